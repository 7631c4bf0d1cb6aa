"""What an MCP server answers, as text that a model can read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mcp_types as types
import pytest

from agentrl.tool.runners import mcp_keeper, mcp_session


def result(*content: Any, structured: Any = None) -> Any:
    return types.CallToolResult(content=list(content), structured_content=structured)


def test_text_is_kept_and_what_is_none_is_named():
    text = types.TextContent(type="text", text="one")
    image = types.ImageContent(type="image", data="aGk=", mime_type="image/png")
    link = types.ResourceLink(type="resource_link", uri="file:///a", name="a")
    inner = types.TextResourceContents(uri="file:///b", text="two")
    blob = types.BlobResourceContents(uri="file:///c", blob="aGk=")
    shown = mcp_session.text_of(
        result(
            text,
            image,
            link,
            types.EmbeddedResource(type="resource", resource=inner),
            types.EmbeddedResource(type="resource", resource=blob),
        )
    )
    assert shown.splitlines() == [
        "one",
        "[image: image/png, 4 characters of base64]",
        "[file:///a]",
        "two",
        "[file:///c: 4 characters of base64]",
    ]


def test_structured_content_stands_in_where_there_is_no_other():
    assert mcp_session.text_of(result(structured={"a": "ä"})) == '{"a": "ä"}'
    assert mcp_session.text_of(result()) == ""


def test_the_log_of_the_sdk_keeps_no_error_that_quotes_a_server():
    try:
        raise ValueError("hunter2")
    except ValueError:
        record = logging.LogRecord("mcp", 40, "f", 1, "failed", None, sys.exc_info())
    assert mcp_session._without_content(record)
    assert "hunter2" not in logging.Formatter().format(record)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("printed", "passed", "aside"),
    [
        ('{"a": 1}\\n{"b": 2}\\n', '{"a": 1}\n{"b": 2}\n', ""),
        ("hello\\n{}\\n", "{}\n", "hello\n"),
        ('{"id": 7, "x": "' + "y" * 300 + '"}\\n{}\\n', '"id":7,"error"', ""),
        ('{"x": "' + "y" * 300, "", "without id"),
    ],
)
def test_the_keeper_passes_messages_on_and_nothing_else(printed: str, passed: str, aside: str):
    program = f"import sys; sys.stdout.write('{printed}')"
    done = subprocess.run(
        [
            *(sys.executable, "-I", "-S", mcp_keeper.__file__, str(os.getpid())),
            *("200", sys.executable, "-I", "-S", "-c", program),
        ],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert passed in done.stdout and aside in done.stderr
    assert "yyy" not in done.stdout


def test_a_server_that_does_not_let_go_is_left_at_the_deadline_of_whoever_closes():
    class Clinging(mcp_session.McpSession):
        async def _own(self) -> None:
            self._ready.set_result(cast(Any, None))
            await asyncio.Event().wait()

    async def main() -> bool:
        session = await Clinging.connect(mcp_session.McpServer(url="http://127.0.0.1:1/mcp"))
        closing = asyncio.ensure_future(session.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        done, _ = await asyncio.wait([session._task], timeout=5)
        return bool(done)

    assert asyncio.run(main())


LEAVES = """
import json, os, subprocess, sys
nothing = subprocess.DEVNULL
left = subprocess.Popen(["sleep", "600"], stdin=nothing, stdout=nothing, start_new_session=True)
print(json.dumps([os.getpid(), left.pid]), flush=True)
sys.stdin.readline()
os._exit(0)
"""


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"


@pytest.mark.timeout(60)
def test_the_keeper_ends_what_was_left_where_it_sees_both_ends_of_the_program_at_once():
    keeper = subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", mcp_keeper.__file__, str(os.getpid())),
            *("2000", sys.executable, "-I", "-S", "-c", LEAVES),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdin is not None and keeper.stdout is not None
    program, left = json.loads(keeper.stdout.readline())
    try:
        keeper.send_signal(signal.SIGSTOP)
        os.waitpid(keeper.pid, os.WUNTRACED)
        keeper.stdin.write("\n")
        keeper.stdin.close()
        while state_of(program) != "Z":  # dead, its output closed, and the keeper has seen neither
            time.sleep(0.01)
        keeper.send_signal(signal.SIGCONT)
        assert keeper.wait(30) == 0
        assert state_of(left) in ("gone", "Z")
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


def test_a_secret_whose_beginning_was_cut_off_is_shown_no_more_than_a_whole_one(
    monkeypatch: pytest.MonkeyPatch,
):
    secret = "".join(f"{number:04d}" for number in range(64))
    monkeypatch.setenv("MCP_SECRET", secret)

    async def main() -> None:
        server = mcp_session.McpServer(program="/bin/p", env=(("KEY", "${env:MCP_SECRET}"),))
        faults = mcp_session._Faults()
        session = SimpleNamespace(_faults=faults, _server=server)
        with mcp_session._stderr_of(faults) as stream:
            for length in range(1990 - len(secret), 2010, 16):
                faults.stderr = b""
                stream.write(f"{secret}{'.' * length}")
                stream.flush()
                while not faults.stderr:
                    await asyncio.sleep(0)
                told = mcp_session.McpSession._told(cast(Any, session), "failed")
                assert secret[-8:] not in told and "....." in told

    asyncio.run(main())


def test_an_answer_of_another_kind_never_breaks_the_text():
    odd = SimpleNamespace(type="audio", data="aGk=", mime_type="audio/wav")
    assert "audio/wav" in mcp_session.text_of(
        SimpleNamespace(content=[odd], structured_content=None)
    )
