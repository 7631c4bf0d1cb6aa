"""The HTTP transport below an MCP session: notes what fails, and bounds what is read.

The SDK tells its caller of a lost server in the same words as of a call that the server refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2

_LOST_SESSION = (401, 403, 404, 410)


class WatchedTransport(httpx2.AsyncHTTPTransport):
    """Passes requests on.

    Args:
        see: is told of every fault.
        max_bytes: of an answer that is no event stream; more is a fault.
    """

    def __init__(self, see: Callable[[str], None], *, max_bytes: int) -> None:
        super().__init__()
        self._see = see
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """See httpx2."""
        try:
            response = await super().handle_async_request(request)
        except Exception as error:
            self._see(f"{type(error).__name__}: {error}")
            raise
        if response.status_code >= 500 or response.status_code in _LOST_SESSION:
            self._see(f"status {response.status_code}")
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            response.stream = _Bounded(response.stream, self._see, self._max_bytes)
        return response


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, inner: Any, see: Callable[[str], None], max_bytes: int) -> None:
        self._inner = inner
        self._see = see
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        try:
            async for chunk in self._inner:
                num_bytes += len(chunk)
                if num_bytes > self._max_bytes:
                    raise httpx2.ReadError(f"an answer longer than {self._max_bytes} bytes")
                yield chunk
        except Exception as error:
            self._see(f"{type(error).__name__}: {error}")
            raise

    async def aclose(self) -> None:
        await self._inner.aclose()
