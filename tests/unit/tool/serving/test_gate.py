"""What is refused before anything of a request is used."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.tool.serving.access import Tokens
from agentrl.tool.serving.config import ServerLimits
from agentrl.tool.serving.gate import OWNER, Gate
from agentrl.tool.serving.metrics import ServerMetrics

TOKEN = "t" * 32


class Caller:
    """Sends one request to a gate in front of an application that repeats the body."""

    def __init__(self, *, tokens: Sequence[str] = (TOKEN,), **limits: Any) -> None:
        self.metrics = ServerMetrics()
        self.reached: list[bytes] = []
        self.release: asyncio.Event | None = None
        self.gate = Gate(
            self._app, tokens=Tokens(tokens), limits=ServerLimits(**limits), metrics=self.metrics
        )

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if self.release is not None:
            await self.release.wait()
        self.reached.append((await receive())["body"] if OWNER in scope else b"open")
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(
        self,
        *chunks: bytes,
        token: str = TOKEN,
        path: str = "/v1/tools",
        length: str | None = None,
        stalls: bool = False,
        more: Sequence[tuple[bytes, bytes]] = (),
    ) -> int:
        waiting = list(chunks)

        async def receive() -> Any:
            if not waiting and stalls:
                await asyncio.sleep(60)
            body = waiting.pop(0) if waiting else b""
            return {"type": "http.request", "body": body, "more_body": bool(waiting) or stalls}

        statuses: list[int] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"authorization", f"Bearer {token}".encode()), *more]
        headers += [(b"content-length", length.encode())] if length is not None else []
        await self.gate(
            {"type": "http", "path": path, "headers": headers, "method": "POST"}, receive, send
        )
        return statuses[0]


def run(body: Any) -> Any:
    return asyncio.run(asyncio.wait_for(body, 20))


def test_a_request_with_a_token_passes_whole():
    caller = Caller()
    assert run(caller.ask(b"one ", b"two", length="7")) == 200
    assert caller.reached == [b"one two"]


def test_only_health_is_open():
    caller = Caller()
    assert run(caller.ask(token="wrong" * 8)) == 401
    assert run(caller.ask(token="wrong" * 8, path="/health")) == 200
    assert caller.reached == [b"open"]
    assert caller.metrics.refused == {"token": 1}


@pytest.mark.parametrize("length", [None, "4", "101", "9" * 60, "-1", "x"])
def test_more_bytes_than_allowed_are_refused_whatever_the_header_says(length: str | None):
    caller = Caller(max_body_bytes=100)
    assert run(caller.ask(b"a" * 60, b"a" * 60, length=length)) == 413
    assert caller.reached == []


def test_a_body_that_does_not_come_is_not_waited_for():
    caller = Caller(body_timeout_s=0.05)
    assert run(caller.ask(b"a", stalls=True)) == 408
    assert caller.gate.num_requests == 0


def test_more_requests_than_allowed_are_refused_until_one_ends():
    async def main() -> list[int]:
        caller = Caller(max_requests=2)
        caller.release = asyncio.Event()
        first = [asyncio.create_task(caller.ask(b"a")) for _ in range(2)]
        while caller.gate.num_requests < 2:
            await asyncio.sleep(0)
        refused = await caller.ask(b"a")
        caller.release.set()
        return [refused, *[await task for task in first], await caller.ask(b"a")]

    assert run(main()) == [503, 200, 200, 200]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ((b"origin", b"https://evil.example"), 403),
        ((b"origin", b"null"), 403),
        ((b"host", b"rebound.example:8200"), 403),
        ((b"host", b"127.0.0.1.evil.example"), 403),
        ((b"host", b"127.0.0.1:8200"), 200),
        ((b"host", b"localhost"), 200),
        ((b"host", b"[::1]:8200"), 200),
    ],
)
def test_without_tokens_no_page_in_a_browser_can_call(header: tuple[bytes, bytes], status: int):
    open_to_all = Caller(tokens=())
    assert run(open_to_all.ask(b"{}", more=[header])) == status
    assert run(Caller().ask(b"{}", more=[header])) == 200  # a page has no token to send
