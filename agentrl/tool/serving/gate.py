"""What stands before every request to a tool server: token, size, and how many there are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from agentrl.tool.serving.access import Tokens, is_loopback
from agentrl.tool.serving.config import ServerLimits
from agentrl.tool.serving.metrics import ServerMetrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OWNER = "agentrl.owner"
"""Key of the ASGI scope under which the caller stands."""
_OPEN_PATHS = frozenset({"/health"})


class Gate:
    """ASGI middleware: refuses with 401, 403, 408, 413 or 503 before anything of a request is used.

    Args:
        app: what answers requests that pass.
        tokens: who may call.
        limits: of the server.
        metrics: where refusals are counted.
    """

    def __init__(
        self, app: App, *, tokens: Tokens, limits: ServerLimits, metrics: ServerMetrics
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._limits = limits
        self._metrics = metrics
        self.num_requests = 0
        """In progress."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self._tokens.required and _is_from_browser(headers):
            text = "without a token the server answers no browser and no name but localhost"
            await self._refuse(send, 403, "origin", text)
            return
        owner = self._tokens.owner(headers.get(b"authorization", b"").decode("latin-1"))
        if owner is None:
            known = "is none of this server's" if b"authorization" in headers else "is missing"
            text = f"the token {known}; give one: Authorization: Bearer TOKEN"
            await self._refuse(send, 401, "token", text)
            return
        if self.num_requests >= self._limits.max_requests:
            text = f"{self.num_requests} requests are in progress, which is the limit"
            await self._refuse(send, 503, "max_requests", text)
            return
        self.num_requests += 1
        try:
            await self._serve({**scope, OWNER: owner}, headers, receive, send)
        finally:
            self.num_requests -= 1

    async def _serve(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        most = self._limits.max_body_bytes
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > most:
            await self._refuse(send, 413, "body", f"a request may have {most:,} bytes")
            return
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                body = await _read(receive, most)
        except TimeoutError:
            text = f"the request did not come in within {self._limits.body_timeout_s:g} s"
            await self._refuse(send, 408, "slow_body", text)
            return
        except _TooLong:
            await self._refuse(send, 413, "body", f"a request may have {most:,} bytes")
            return
        if body is None:  # the caller is gone
            return
        await self._app(scope, _replay(body, receive), send)

    async def _refuse(self, send: Send, status: int, reason: str, text: str) -> None:
        self._metrics.refused[reason] += 1
        content = json.dumps({"detail": text}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),  # what is left of the body is not read
        ]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def _is_from_browser(headers: dict[bytes, bytes]) -> bool:
    """Return whether a page in a browser may have sent it, by its origin or by the name it used."""
    host = headers.get(b"host", b"localhost").decode("latin-1")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return b"origin" in headers or not is_loopback(name)


class _TooLong(Exception):
    """More bytes than a request may have."""


async def _read(receive: Receive, most: int) -> bytes | None:
    chunks: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        length += len(chunk)
        if length > most:
            raise _TooLong
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body at once, and then what comes after it."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
