"""What an MCP server answers, as text that a model can read."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.tool.runners import mcp_keeper, mcp_session

types: Any = pytest.importorskip("mcp_types")


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


def test_an_answer_of_another_kind_never_breaks_the_text():
    odd = SimpleNamespace(type="audio", data="aGk=", mime_type="audio/wav")
    assert "audio/wav" in mcp_session.text_of(
        SimpleNamespace(content=[odd], structured_content=None)
    )
