"""The HTTP transport below an MCP session: notes what fails, and bounds what is read.

The SDK tells its caller of a lost server in the same words as of a call that the server refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx2

_LOST_SESSION = (401, 403, 404, 410)
_INTERNAL_ERROR = -32603


class WatchedTransport(httpx2.AsyncHTTPTransport):
    """Passes requests on.

    Args:
        see: is told of every fault.
        max_bytes: of an answer that is no event stream; a longer one is answered in its place as a
            failed request of JSON-RPC.
    """

    def __init__(self, see: Callable[[str], None], *, max_bytes: int) -> None:
        super().__init__()
        self._see = see
        self._max_bytes = max_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """See httpx2."""
        try:
            response = await super().handle_async_request(request)
            if response.status_code >= 500 or response.status_code in _LOST_SESSION:
                self._see(f"status {response.status_code}")
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                return response
            return await self._bounded(request, response)
        except Exception as error:
            self._see(f"{type(error).__name__}: {error}")
            raise

    async def _bounded(self, request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        body = bytearray()
        try:
            async for chunk in response.stream:  # pyright: ignore[reportGeneralTypeIssues]
                body += chunk
                if len(body) > self._max_bytes:
                    return self._too_long(request)
        finally:
            await response.aclose()
        return httpx2.Response(
            response.status_code, headers=response.headers, content=bytes(body), request=request
        )

    def _too_long(self, request: httpx2.Request) -> httpx2.Response:
        message = f"the answer is longer than {self._max_bytes} bytes; ask for less"
        answer = {
            "jsonrpc": "2.0",
            "id": json.loads(request.content).get("id"),
            "error": {"code": _INTERNAL_ERROR, "message": message},
        }
        return httpx2.Response(200, json=answer, request=request)
