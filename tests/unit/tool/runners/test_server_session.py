"""Sessions with a tool server that loses them, or repeats what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentrl.errors import InfrastructureError
from agentrl.testing import FakeSandboxes
from agentrl.testing.json_server import Answer, JsonServer
from agentrl.tool.base import ToolContext
from agentrl.tool.runners.server import ServerTool
from agentrl.tool.runners.server_session import Server

TOKEN = "0123456789abcdef" * 4
OK = {"status": "ok", "content": "seen", "reward": 0.0, "cut_chars": 0}
CONTEXT = ToolContext(trajectory_id="t", seed=1, sandboxes=FakeSandboxes())

Endpoints = dict[str, Callable[[Any, Any], Awaitable[Answer]]]


def says(status: int, value: Any) -> Callable[[Any, Any], Awaitable[Answer]]:
    async def endpoint(body: Any, query: Any) -> Answer:
        return status, value

    return endpoint


def with_tool(
    endpoints: Endpoints,
    scenario: Callable[[ServerTool], Awaitable[None]],
    token: str | None = None,
) -> list[str]:
    """Open a stateless tool, play a scenario; return what the server was asked."""

    async def main() -> list[str]:
        server = JsonServer(endpoints)
        await server.start()
        tool = ServerTool(
            Server(server.url, token), "x", timeout_s=20.0, max_bytes=65_536, stateless=True
        )
        try:
            async with asyncio.timeout(30):
                await tool.open(CONTEXT)
                await scenario(tool)
                await tool.close()
        finally:
            await server.close()
        return [key for key, _ in server.requests]

    return asyncio.run(main())


def test_calls_that_find_their_session_lost_at_the_same_time_open_one_new_one():
    names = iter("abcdef")
    both_lost = asyncio.Barrier(2)

    async def opens(body: Any, query: Any) -> Answer:
        return 201, {"session": next(names)}

    async def is_lost(body: Any, query: Any) -> Answer:
        await both_lost.wait()
        return 403, {"detail": "unknown"}

    async def scenario(tool: ServerTool) -> None:
        replies = await asyncio.gather(tool.call(), tool.call())
        assert [reply.content for reply in replies] == ["seen", "seen"]

    asked = with_tool(
        {
            "POST /v1/sessions": opens,
            "POST /v1/sessions/a/calls": is_lost,
            "POST /v1/sessions/b/calls": says(200, OK),
            "POST /v1/sessions/c/calls": says(200, OK),
            "DELETE /v1/sessions/b": says(204, ""),
            "DELETE /v1/sessions/c": says(204, ""),
        },
        scenario,
    )
    assert asked.count("POST /v1/sessions") == 2


@pytest.mark.parametrize(
    "answer",
    [
        says(500, "x" * 280 + TOKEN),
        says(200, "x" * 80 + TOKEN),
        says(200, {**OK, "status": "infra_error", "content": "x" * 480 + TOKEN}),
    ],
)
def test_no_part_of_a_token_that_a_server_repeats_is_shown(
    answer: Callable[[Any, Any], Awaitable[Answer]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SERVER_TOKEN", TOKEN)

    async def scenario(tool: ServerTool) -> None:
        with pytest.raises(InfrastructureError) as refused:
            await tool.call()
        assert TOKEN[:8] not in str(refused.value)

    endpoints = {
        "POST /v1/sessions": says(201, {"session": "a"}),
        "POST /v1/sessions/a/calls": answer,
        "DELETE /v1/sessions/a": says(204, ""),
    }
    with_tool(endpoints, scenario, "${env:SERVER_TOKEN}")


def test_an_answer_that_repeats_the_token_is_cleared_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVER_TOKEN", TOKEN)

    async def scenario(tool: ServerTool) -> None:
        assert (await tool.call()).content == "Bearer ${env:SERVER_TOKEN}: caf\u00e9"

    endpoints = {
        "POST /v1/sessions": says(201, {"session": "a"}),
        "POST /v1/sessions/a/calls": says(200, {**OK, "content": f"Bearer {TOKEN}: caf\u00e9"}),
        "DELETE /v1/sessions/a": says(204, ""),
    }
    with_tool(endpoints, scenario, "${env:SERVER_TOKEN}")


def test_that_a_limit_cut_an_answer_short_comes_over_the_network():
    async def scenario(tool: ServerTool) -> None:
        assert [(await tool.call()).cut_short for _ in range(2)] == [True, False]
        with pytest.raises(InfrastructureError, match="no answer of a tool"):
            await tool.call()

    answers = iter([{**OK, "cut_short": True}, OK, {**OK, "cut_short": "no"}])

    async def calls(body: Any, query: Any) -> Answer:
        return 200, next(answers)

    with_tool(
        {
            "POST /v1/sessions": says(201, {"session": "a"}),
            "POST /v1/sessions/a/calls": calls,
            "DELETE /v1/sessions/a": says(204, ""),
        },
        scenario,
    )
