"""``agentrl tools serve`` as callers see it: over HTTP, over MCP, as tools of an episode."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from tool_servers import ENVIRON, OTHER_TOKEN, TOKEN, ToolServerProcess

from agentrl.agent.renderer import Renderer
from agentrl.errors import ToolSpecError
from agentrl.testing import FakeSandboxes, make_tokenizer
from agentrl.tool.base import ToolContext
from agentrl.tool.binding import Toolbox
from agentrl.tool.executor import ToolExecutor
from agentrl.types import ToolCall, ToolResult, ToolStatus

pytestmark = pytest.mark.timeout(120)
CODEC = Renderer(make_tokenizer()).codec


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolServerProcess]:
    arguments = ("--token-env", "TOOLS_TOKEN", "--token-env", "OTHER_TOKEN", "--max-body", "100000")
    started = ToolServerProcess(tmp_path_factory.mktemp("server"), *arguments)
    started.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRON.items():
            patch.setenv(name, value)
        yield started
    started.kill()


def ask(server: ToolServerProcess, method: str, path: str, token: str = TOKEN, **request: Any):
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.request(method, server.url + path, headers=headers, timeout=20, **request)


def metric(server: ToolServerProcess, name: str) -> float:
    lines = ask(server, "GET", "/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"agentrl_tool_{name}")
    )


# ----------------------------------------------------------------------------- over HTTP


def test_a_session_keeps_state_and_ends_with_it(server: ToolServerProcess):
    opened = ask(server, "POST", "/v1/sessions", json={"seed": 1, "state": {"start": 5}})
    path = f"/v1/sessions/{opened.json()['session']}"
    said = [
        ask(server, "POST", f"{path}/calls", json={"name": "counter", "arguments": {"by": by}})
        for by in (2, 3)
    ]
    assert [answer.json()["content"] for answer in said] == ['{"n": 7}', '{"n": 10}']
    assert ask(server, "DELETE", path).status_code == 204
    gone = ask(server, "POST", f"{path}/calls", json={"name": "counter"})
    assert (gone.status_code, gone.json()["reason"]) == (403, "unknown_session")


def test_the_session_of_another_token_is_refused_and_counted(server: ToolServerProcess):
    session = ask(server, "POST", "/v1/sessions", json={}).json()["session"]
    before = metric(server, 'server_refused_total{reason="foreign_session"}')
    for method, path in (("POST", "/calls"), ("DELETE", ""), ("POST", "/tools/counter")):
        answer = ask(
            server,
            method,
            f"/v1/sessions/{session}{path}",
            OTHER_TOKEN,
            **({"json": {"name": "counter"}} if path == "/calls" else {}),
        )
        assert answer.status_code == 403
    guessed = ask(server, "POST", f"/v1/sessions/{'a' * 43}/calls", json={"name": "counter"})
    assert guessed.status_code == 403
    assert guessed.json()["detail"] == answer.json()["detail"]
    assert metric(server, 'server_refused_total{reason="foreign_session"}') == before + 3
    mine = ask(server, "POST", f"/v1/sessions/{session}/calls", json={"name": "counter"})
    assert mine.json()["content"] == '{"n": 1}'  # nobody had counted


def test_without_a_token_nothing_but_health_answers(server: ToolServerProcess):
    for path in ("/v1/tools", "/metrics", "/openapi.json", "/docs", "/mcp"):
        assert httpx.get(server.url + path).status_code == 401
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 422),
        (b"[]", 422),
        (b'{"name": 5}', 422),
        (b'{"name": "counter", "arguments": []}', 422),
        (b'{"name": "counter", "surprise": 1}', 422),
        (b'{"name": "counter", "timeout_s": -1}', 422),
        (b"[" * 90_000, 422),
        (b'"' + b"x" * 200_000 + b'"', 413),
    ],
)
def test_what_is_no_call_is_refused(server: ToolServerProcess, body: bytes, status: int):
    session = ask(server, "POST", "/v1/sessions", json={}).json()["session"]
    path = f"/v1/sessions/{session}/calls"
    json_type = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    answer = httpx.post(server.url + path, content=body, headers=json_type, timeout=20)
    assert answer.status_code == status
    ask(server, "DELETE", f"/v1/sessions/{session}")


def test_a_body_that_does_not_fit_is_told_in_one_sentence(server: ToolServerProcess):
    def told(path: str, body: dict) -> str:
        return ask(server, "POST", path, json=body).json()["detail"]

    assert told("/v1/sessions", {"sed": 1}) == "unknown key 'sed'; the body may have: seed, state"
    calls = f"/v1/sessions/{ask(server, 'POST', '/v1/sessions').json()['session']}/calls"
    wrong = told(calls, {"nam": "counter", "timeout_s": -1})
    assert "'name' is missing" in wrong and "unknown key 'nam'" in wrong
    assert "timeout_s: " in wrong and "got -1" in wrong and "\n" not in wrong


def test_curl_needs_no_header_for_json(server: ToolServerProcess):
    form = {"Content-Type": "application/x-www-form-urlencoded", "Authorization": f"Bearer {TOKEN}"}

    def post(path: str, body: str) -> dict:
        return httpx.post(server.url + path, content=body, headers=form, timeout=20).json()

    session = post("/v1/sessions", '{"seed": 1}')["session"]
    assert post(f"/v1/sessions/{session}/calls", '{"name": "counter"}')["status"] == "ok"
    assert post("/v1/tools/counter", "{}")["status"] == "ok"
    schema = ask(server, "GET", "/openapi.json").json()["paths"]["/v1/sessions/{session_id}/calls"]
    body = schema["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"name", "arguments", "timeout_s"} == set(body["properties"])


def test_openapi_has_a_path_with_the_parameters_of_each_tool(server: ToolServerProcess):
    paths = ask(server, "GET", "/openapi.json").json()["paths"]
    body = paths["/v1/tools/counter"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["properties"] == {"by": {"type": "integer"}}
    assert ask(server, "POST", "/v1/tools/counter", json={"by": 4}).json()["content"] == '{"n": 4}'
    wrong = ask(server, "POST", "/v1/tools/counter", json={"bye": 4}).json()
    assert wrong["status"] == "error" and "did you mean 'by'?" in wrong["content"]


# ----------------------------------------------------------------------------- over MCP


def test_the_same_tools_answer_over_mcp_with_state_per_session(server: ToolServerProcess):
    async def main() -> tuple[list[str], list[str], bool]:
        async with (
            create_mcp_http_client(headers={"Authorization": f"Bearer {TOKEN}"}) as http,
            streamable_http_client(f"{server.url}/mcp", http_client=http) as streams,
            ClientSession(streams[0], streams[1]) as session,
        ):
            await session.initialize()
            names = [tool.name for tool in (await session.list_tools()).tools]
            said: list[Any] = [await session.call_tool("counter", {"by": by}) for by in (2, 3, 13)]
            return names, [result.content[0].text for result in said], said[2].is_error

    closed = 'server_sessions_closed_total{reason="client"}'
    before = metric(server, closed)
    names, texts, is_error = asyncio.run(asyncio.wait_for(main(), 60))
    assert names == ["counter", "wait", "block"]
    assert texts == ['{"n": 2}', '{"n": 5}', "error: thirteen is unlucky"]
    assert is_error
    assert metric(server, closed) == before + 1


# ----------------------------------------------------------------------------- as tools


def spec(folder: Path, url: str, more: str = "", token: str = "TOOLS_TOKEN") -> str:
    path = folder / "remote.yaml"
    path.write_text(f"server:\n  url: {url}\n  token: ${{env:{token}}}\n{more}")
    return str(path)


def run(toolbox: Toolbox, *turns: list[ToolCall], state: dict[str, Any] | None = None):
    """Run turns of calls in one trajectory."""

    async def context(name: str) -> ToolContext:
        return ToolContext(trajectory_id="tr", seed=1, sandboxes=FakeSandboxes(), state=state or {})

    async def main() -> list[ToolResult]:
        executor = ToolExecutor(toolbox, make_context=context, cut=CODEC.cut)
        results: list[ToolResult] = []
        try:
            for calls in turns:
                await executor.run_turn(calls, results)
        finally:
            await executor.close()
        return results

    return asyncio.run(asyncio.wait_for(main(), 60))


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def test_two_lines_of_yaml_are_all_tools_of_a_server(server: ToolServerProcess, tmp_path: Path):
    toolbox = Toolbox([spec(tmp_path, server.url)])
    assert list(toolbox.bindings) == ["counter", "wait", "block"]
    assert toolbox.bindings["counter"].spec.limits.max_output_tokens == 32
    assert [toolbox.bindings[n].overlaps for n in ("counter", "wait")] == [False, True]
    log = tmp_path / "log"
    results = run(
        toolbox,
        [call("counter", by=2), call("wait"), call("counter", by=3)],
        [call("counter", by=13), call("counter", by=15), call("counter", by=16)],
        state={"start": 1, "log": str(log)},
    )
    assert [r.status for r in results[:3]] == [ToolStatus.OK] * 3
    assert (results[0].content, results[2].content) == ('{"n": 3}', '{"n": 6}')
    assert (results[3].content, results[3].status) == (
        "error: thirteen is unlucky",
        ToolStatus.ERROR,
    )
    assert (results[4].content, results[4].reward) == ("paid", 0.25)
    assert [r.cut_short for r in results] == [False, False, False, False, True, False]
    body, _, note = results[5].content.rpartition("\n")
    assert len(CODEC.encode_plain(body)) <= 32
    assert note == f"[cut: {results[5].truncated_tokens} more tokens]"
    assert results[5].truncated_tokens > 1000
    assert log.read_text() == "closed 6\n"  # with the trajectory


def test_some_tools_under_names_with_a_prefix(server: ToolServerProcess, tmp_path: Path):
    more = "  tools: [wait, counter]\n  prefix: far_\nlimits: {timeout_s: 3}\n"
    toolbox = Toolbox([spec(tmp_path, server.url, more)])
    assert list(toolbox.bindings) == ["far_wait", "far_counter"]
    assert toolbox.bindings["far_wait"].spec.limits.timeout_s == 3
    (result,) = run(toolbox, [call("far_counter", by=1)])
    assert result.content == '{"n": 1}'


def test_one_tool_with_a_description_of_ones_own(server: ToolServerProcess, tmp_path: Path):
    more = "  tool: counter\nname: tally\ndescription: Tally up.\n"
    toolbox = Toolbox([spec(tmp_path, server.url, more)])
    assert toolbox.schemas[0]["function"]["description"] == "Tally up."
    assert toolbox.schemas[0]["function"]["parameters"]["properties"] == {"by": {"type": "integer"}}
    (result,) = run(toolbox, [call("tally", by=1)])
    assert result.content == '{"n": 1}'


def test_what_fails_on_the_server_for_its_own_reasons_is_our_failure(
    server: ToolServerProcess, tmp_path: Path
):
    (result,) = run(Toolbox([spec(tmp_path, server.url)]), [call("counter", by=14)])
    assert result.status is ToolStatus.INFRA_ERROR
    assert "the abacus is broken" in result.content


def test_a_tool_that_is_late_on_the_server_is_a_late_tool_and_no_lost_server(
    server: ToolServerProcess, tmp_path: Path
):
    toolbox = Toolbox([spec(tmp_path, server.url, "limits: {timeout_s: 0.3}\n")])
    (result,) = run(toolbox, [call("wait", seconds=30)])
    assert (result.status, result.content) == (
        ToolStatus.TIMEOUT,
        "error: timed out after 0.3 s",
    )


@pytest.mark.parametrize(
    ("more", "token", "problem"),
    [
        ("  tool: countr\n", "TOOLS_TOKEN", "has no tool 'countr'; it has counter, wait, block"),
        ("", "NO_SUCH_TOKEN", "NO_SUCH_TOKEN is not set"),
        ("  port: 5\n", "TOOLS_TOKEN", "unknown key 'port'"),
        ("  tool: a\n  prefix: b\n", "TOOLS_TOKEN", "server.prefix belongs to a spec of several"),
    ],
)
def test_a_spec_that_cannot_work_is_refused_at_the_start(
    server: ToolServerProcess, tmp_path: Path, more: str, token: str, problem: str
):
    with pytest.raises(ToolSpecError, match=problem):
        Toolbox([spec(tmp_path, server.url, more, token)])


def test_a_token_that_the_server_does_not_know_is_refused_without_being_shown(
    server: ToolServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WRONG_TOKEN", "not-the-secret-of-this-server")
    with pytest.raises(ToolSpecError, match="answered 401") as caught:
        Toolbox([spec(tmp_path, server.url, token="WRONG_TOKEN")])
    assert "not-the-secret" not in str(caught.value)


def test_a_token_written_out_is_refused_without_being_shown(tmp_path: Path):
    path = tmp_path / "remote.yaml"
    path.write_text("server:\n  url: http://127.0.0.1:9\n  token: sk-abcdefgh\n")
    with pytest.raises(ToolSpecError, match=r"remote\.yaml:3:\d+.*env:NAME") as caught:
        Toolbox([str(path)])
    assert "abcdefgh" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["ftp://a", "http://a/path", "http://u:p@a", "http://", "a:80", "http://a?b"]
)
def test_what_is_no_url_of_a_server_is_refused(tmp_path: Path, url: str):
    with pytest.raises(ToolSpecError, match=r"server\.url|server: "):
        Toolbox([spec(tmp_path, url)])


def test_nothing_is_left_open_behind_a_trajectory(server: ToolServerProcess, tmp_path: Path):
    toolbox = Toolbox([spec(tmp_path, server.url)])
    before = metric(server, "server_sessions ")
    run(toolbox, [call("counter", by=1), call("wait")])
    gc.collect()  # an unclosed connection would warn, and the warning fails the test
    assert metric(server, "server_sessions ") == before


# ----------------------------------------------------------------------------- its end


def test_sigterm_lets_calls_end_and_closes_every_session(tmp_path: Path):
    server = ToolServerProcess(tmp_path)
    server.start()
    try:
        log = tmp_path / "log"
        state = {"log": str(log)}
        session = ask(server, "POST", "/v1/sessions", json={"state": state}).json()["session"]
        ask(
            server,
            "POST",
            f"/v1/sessions/{session}/calls",
            json={"name": "counter", "arguments": {"by": 7}},
        )
        assert server.stop() == 0
        assert log.read_text() == "closed 7\n"
    finally:
        server.kill()
