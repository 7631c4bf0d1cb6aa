"""MCP servers as tools: two public ones, by a spec of a few lines each; our own; one over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import InfrastructureError, ToolError, ToolSpecError
from agentrl.tool.base import ToolContext
from agentrl.tool.binding import Toolbox

pytestmark = pytest.mark.timeout(60)

SECRET = "hunter2-and-more"


def write(folder: Path, text: str, name: str = "spec.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def context(trajectory: str) -> ToolContext:
    nothing: Any = None
    return ToolContext(trajectory_id=trajectory, seed=0, sandboxes=nothing, workspace=nothing)


async def called(box: Toolbox, name: str, trajectory: str = "t", **arguments: Any) -> Any:
    tool = box.bindings[name].make()
    await tool.open(context(trajectory))
    try:
        return await tool.call(**arguments)
    finally:
        await tool.close()


def descendants() -> set[int]:
    """Return the processes below this one that live, those of servers for a whole run included."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


# ------------------------------------------------------------------ public servers


def test_the_public_time_server_is_a_tool(tmp_path: Path):
    box = Toolbox(
        [
            write(
                tmp_path,
                "mcp:\n  command: [mcp-server-time, --local-timezone, UTC]\n  prefix: time_\n"
                "limits: {timeout_s: 20}\n",
            )
        ]
    )
    assert set(box.bindings) == {"time_get_current_time", "time_convert_time"}
    for binding in box.bindings.values():
        assert binding.spec.limits.timeout_s == 20 and binding.spec.description
    arguments = {"source_timezone": "Asia/Tokyo", "time": "12:30", "target_timezone": "UTC"}
    answer = asyncio.run(called(box, "time_convert_time", **arguments))
    assert "03:30" in answer
    with pytest.raises(ToolError, match="Nowhere"):
        asyncio.run(called(box, "time_get_current_time", timezone="Nowhere/X"))


def test_the_public_git_server_is_a_tool(tmp_path: Path):
    repository = tmp_path / "repository"
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "init", "-q", str(repository)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "the first"], check=True)
    box = Toolbox(
        [
            write(
                tmp_path,
                f"mcp:\n  command: [mcp-server-git, --repository, {repository}]\n"
                "  tools: [git_log]\n",
            )
        ]
    )
    assert set(box.bindings) == {"git_log"}
    assert "the first" in asyncio.run(called(box, "git_log", repo_path=str(repository)))
    with pytest.raises(ToolError):
        asyncio.run(called(box, "git_log", repo_path="/"))


# ------------------------------------------------------------------ a server of our own

# Speaks the protocol by hand: it starts in a tenth of the time of one that imports the SDK.
SERVER = """
import json, os, subprocess, sys, time

TEXT = {"type": "string"}
TOOLS = {"put": {"key": TEXT, "value": TEXT}, "get": {"key": TEXT}, "environment": {},
         "large": {"size": {"type": "integer"}}, "end": {}, "leave_behind": {}, "hang": {}}
values = {}


def run(name, key="", value="", size=0):
    if name == "put":
        values[key] = value
        return "kept"
    if name == "get":
        return values.get(key, "nothing")
    if name == "environment":
        return "\\n".join(f"{k}={v}" for k, v in os.environ.items())
    if name == "large":
        return "x" * size
    if name == "end":
        print("ended by its", os.environ.get("TOKEN"), file=sys.stderr, flush=True)
        os._exit(3)
    if name == "leave_behind":
        code = "import os,time; os.setsid(); time.sleep(300)"
        return str(subprocess.Popen([sys.executable, "-S", "-c", code]).pid)
    time.sleep(300)


def answer(method, params):
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "own", "version": "1"}}
    if method == "tools/list":
        told = f"Knows {os.environ.get('TOKEN')}"
        return {"tools": [{"name": name, "description": told, "inputSchema": {"type": "object",
                "properties": given, "required": list(given), "description": told}}
                for name, given in TOOLS.items()]}
    text = run(params["name"], **params.get("arguments", {}))
    return {"content": [{"type": "text", "text": text}]}


print("printed by mistake", os.environ.get("TOKEN"), flush=True)
print('{"no message":', os.environ.get("TOKEN"), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        reply = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] in ("initialize", "tools/list", "tools/call"):
            reply["result"] = answer(message["method"], message.get("params", {}))
        else:
            reply["error"] = {"code": -32601, "message": "unknown method"}
        print(json.dumps(reply), flush=True)
"""


def own_server(folder: Path, more: str = "") -> str:
    (folder / "server").write_text(f"#!{sys.executable} -SI\n{SERVER}")
    (folder / "server").chmod(0o755)
    return write(folder, f"mcp:\n  command: [./server]\n{more}")


def test_tools_of_a_trajectory_share_a_server_and_trajectories_do_not(tmp_path: Path):
    before = descendants()
    box = Toolbox([own_server(tmp_path)])

    async def check() -> None:
        put, get, other = (box.bindings[name].make() for name in ("put", "get", "get"))
        await asyncio.gather(
            put.open(context("a")), get.open(context("a")), other.open(context("b"))
        )
        assert await put.call(key="k", value="v") == "kept"
        assert await get.call(key="k") == "v"
        assert await other.call(key="k") == "nothing"
        await put.close()
        assert await get.call(key="k") == "v"
        await asyncio.gather(get.close(), other.close())

    asyncio.run(check())
    assert asyncio.run(called(box, "get", "a", key="k")) == "nothing"
    assert descendants() == before


def test_a_run_may_share_one_server(tmp_path: Path):
    box = Toolbox([own_server(tmp_path, "  share: run\n")])
    asyncio.run(called(box, "put", "a", key="k", value="v"))
    assert asyncio.run(called(box, "get", "b", key="k")) == "v"
    with pytest.raises(InfrastructureError):
        asyncio.run(called(box, "end", "c"))
    assert asyncio.run(called(box, "get", "d", key="k")) == "nothing"


def test_a_server_that_dies_fails_the_call_as_ours_and_the_next_trajectory_has_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOKEN", SECRET)
    box = Toolbox([own_server(tmp_path, '  env: {TOKEN: "${env:TOKEN}"}\n')])
    with pytest.raises(InfrastructureError) as caught:
        asyncio.run(called(box, "end"))
    assert "ended by its ${env:TOKEN}" in str(caught.value)
    assert asyncio.run(called(box, "get", key="k")) == "nothing"


def test_secrets_reach_the_server_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("HF_TOKEN", "never-handed-on")
    caplog.set_level("DEBUG")
    box = Toolbox([own_server(tmp_path, '  env: {TOKEN: "${env:TOKEN}"}\n')])
    answer = asyncio.run(called(box, "environment"))
    assert "TOKEN=${env:TOKEN}" in answer and "HF_TOKEN" not in answer
    out, err = capfd.readouterr()
    everything = [answer, caplog.text, out, err, repr(box.bindings), json.dumps(box.schemas)]
    assert not any(SECRET in text for text in everything)


def test_an_answer_that_is_too_long_is_told_to_the_model_and_the_server_lives(tmp_path: Path):
    box = Toolbox([own_server(tmp_path, "  max_bytes: 100000\n")])

    async def check() -> None:
        large, get = box.bindings["large"].make(), box.bindings["get"].make()
        await asyncio.gather(large.open(context("a")), get.open(context("a")))
        assert len(await large.call(size=1000)) == 1000
        with pytest.raises(ToolError, match="longer than 100000 bytes"):
            await large.call(size=3_000_000)
        assert await get.call(key="k") == "nothing"
        await asyncio.gather(large.close(), get.close())

    asyncio.run(check())


def test_a_call_that_hangs_can_be_left_and_the_server_is_ended(tmp_path: Path):
    before = descendants()
    box = Toolbox([own_server(tmp_path)])

    async def check() -> None:
        tool = box.bindings["hang"].make()
        await tool.open(context("a"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await tool.call()
        await tool.close()

    asyncio.run(check())
    assert descendants() == before


@pytest.mark.parametrize("how", ["killed", "finished"])
def test_no_process_of_a_server_outlives_its_owner(tmp_path: Path, how: str):
    spec = own_server(tmp_path, "  share: run\n")
    owner = subprocess.Popen(
        [sys.executable, __file__, spec, how], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 3  # keeper, server, and what the server left behind
    if how == "killed":
        assert all(is_alive(pid) for pid in pids)
        os.kill(owner.pid, signal.SIGKILL)
    owner.wait(20)
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if is_alive(pid)]
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def own_and_wait(spec: str, how: str) -> None:
    """Run in a process of its own: start a server, tell its processes, and die or end."""
    box = Toolbox([spec])

    async def start() -> None:
        await called(box, "leave_behind")

    asyncio.run(start())
    print(*sorted(descendants()), flush=True)
    if how == "killed":
        time.sleep(60)


# ------------------------------------------------------------------ refused at the start


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("[python, -c, 'import os']", "not allowed"),
        ("[bash, -c, 'touch witness']", "not allowed"),
        ("[/bin/sh, -c, 'touch witness']", "not allowed"),
        ("[../server]", "not allowed"),
        ("[pytest]", r"folder; set tools.allow_command=\[pytest\] \(--allow-command pytest\)"),
        ("[mcp-server-nowhere]", "no such program here: install its package"),
        ("[./missing]", "no program"),
        ("[]", "is empty"),
        ("mcp-server-time", "must be a list"),
    ],
)
def test_what_a_spec_may_not_start_is_refused(tmp_path: Path, command: str, what: str):
    path = write(tmp_path, f"mcp:\n  command: {command}\n")
    with pytest.raises(ToolSpecError, match=what) as caught:
        Toolbox([path])
    assert f"{path}:2:" in str(caught.value)
    assert not (tmp_path / "witness").exists()


def test_a_program_is_started_where_the_user_allows_it(tmp_path: Path):
    (tmp_path / "server.py").write_text(SERVER)
    path = write(tmp_path, f"mcp:\n  command: [{sys.executable}, server.py]\n  tools: [get]\n")
    box = Toolbox([path], allow_command=[sys.executable])
    assert asyncio.run(called(box, "get", key="k")) == "nothing"


def test_a_server_that_cannot_start_is_told_at_the_start_with_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOKEN", SECRET)
    text = "#!/bin/sh\necho no licence for $TOKEN >&2\nexit 4\n"
    (tmp_path / "server").write_text(text)
    (tmp_path / "server").chmod(0o755)
    path = write(tmp_path, 'mcp:\n  command: [./server]\n  env: {TOKEN: "${env:TOKEN}"}\n')
    with pytest.raises(ToolSpecError) as caught:
        Toolbox([path])
    assert "no licence for ${env:TOKEN}" in str(caught.value)


def test_a_server_that_never_answers_is_given_up_at_its_deadline(tmp_path: Path):
    before = descendants()
    (tmp_path / "server").write_text("#!/bin/sh\nexec sleep 300\n")
    (tmp_path / "server").chmod(0o755)
    path = write(tmp_path, "mcp:\n  command: [./server]\n  start_timeout_s: 0.5\n")
    with pytest.raises(ToolSpecError, match=r"did not answer within 0\.5 s"):
        Toolbox([path])
    assert descendants() == before


def test_a_tool_that_the_server_lacks_is_refused(tmp_path: Path):
    with pytest.raises(ToolSpecError, match=r"no tool 'gett'; it has: .*get"):
        Toolbox([own_server(tmp_path, "  tools: [gett]\n")])


def test_one_tool_may_be_described_anew(tmp_path: Path):
    spec = own_server(tmp_path, "  tool: get\nname: fetch\ndescription: Gets it.\n")
    box = Toolbox([spec])
    schema = box.schemas[0]["function"]
    assert (schema["name"], schema["description"]) == ("fetch", "Gets it.")
    assert schema["parameters"]["required"] == ["key"]
    assert asyncio.run(called(box, "fetch", key="k")) == "nothing"


# ------------------------------------------------------------------ over HTTP


@pytest.fixture(scope="module")
def over_http() -> Iterator[str]:
    """The URL of a server over streamable HTTP that wants a token."""
    import uvicorn
    from mcp.server.mcpserver import MCPServer

    served, values = MCPServer("served", log_level="ERROR"), {}

    @served.tool()
    def put(key: str, value: str) -> str:
        """Keep a value."""
        values[key] = value
        return "kept"

    @served.tool()
    def get(key: str) -> str:
        """Return a value."""
        return values.get(key, "nothing")

    @served.tool()
    def large(size: int) -> str:
        """Return much."""
        return "x" * size

    app = served.streamable_http_app(json_response=True)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http" and headers.get(b"authorization") != f"Bearer {SECRET}".encode():
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": headers.get(b"authorization", b"")})
            return
        await app(scope, receive, send)

    config = uvicorn.Config(guarded, host="127.0.0.1", port=0, log_level="error", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}/mcp"
    server.should_exit = True
    thread.join(10)


def http_spec(folder: Path, url: str, more: str = "") -> str:
    return write(
        folder,
        f'mcp:\n  url: {url}\n  headers: {{Authorization: "Bearer ${{env:TOKEN}}"}}\n{more}',
    )


def test_a_server_over_http_is_a_tool(
    tmp_path: Path, over_http: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOKEN", SECRET)
    box = Toolbox([http_spec(tmp_path, over_http, "  tools: [put, get, large]\n")])

    async def check() -> None:
        put, get = box.bindings["put"].make(), box.bindings["get"].make()
        await asyncio.gather(put.open(context("a")), get.open(context("a")))
        assert await put.call(key="h", value="v") == "kept"
        assert await get.call(key="h") == "v"
        await asyncio.gather(put.close(), get.close())

    asyncio.run(check())


def test_an_answer_over_http_is_bounded(
    tmp_path: Path, over_http: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TOKEN", SECRET)
    spec = http_spec(tmp_path, over_http, "  max_bytes: 20000\n  tools: [large]\n")
    box = Toolbox([spec])
    with pytest.raises(ToolError, match="longer than 20000 bytes"):
        asyncio.run(called(box, "large", size=100_000))
    assert len(asyncio.run(called(box, "large", size=1000))) == 1000


@pytest.mark.parametrize("token", ["wrong-token-here", SECRET])
def test_a_server_over_http_that_is_not_there_or_refuses_is_told_without_the_secret(
    tmp_path: Path, over_http: str, monkeypatch: pytest.MonkeyPatch, token: str
):
    monkeypatch.setenv("TOKEN", token)
    url = over_http if token != SECRET else "http://127.0.0.1:1/mcp"
    with pytest.raises(ToolSpecError) as caught:
        Toolbox([http_spec(tmp_path, url, "  start_timeout_s: 10.5\n")])
    assert url in str(caught.value) and token not in str(caught.value)


def test_an_unset_variable_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TOKEN", raising=False)
    with pytest.raises(ToolSpecError, match="TOKEN is not set"):
        Toolbox([http_spec(tmp_path, "http://127.0.0.1:1/mcp")])


if __name__ == "__main__":
    own_and_wait(sys.argv[1], sys.argv[2])
