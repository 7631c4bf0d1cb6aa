"""What listens for requests: a port that is one, and heads of requests that end.

Shared with the tool server. uvicorn bounds neither the length of a head nor the time that it takes
(with h11 only its length), and both are spent before any token is looked at.
"""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl.errors import ConfigError

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0


def check_port(port: int) -> None:
    """Raise :class:`ConfigError` for what is no port: the system takes 65536 for 0."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port {port} must be from 1 to 65535, or 0 for any that is free")


def http_protocol(
    *, max_head_bytes: int = MAX_HEAD_BYTES, head_timeout_s: float = HEAD_TIMEOUT_S
) -> Any:
    """Return what uvicorn takes as ``http``: it ends a connection whose head does not end.

    Args:
        max_head_bytes: of the request line and all headers.
        head_timeout_s: seconds from the first byte of a head to its last, and from connecting to
            the end of the first head.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedHeadProtocol(HttpToolsProtocol):
        _head_timer: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self._begin_head()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._head_timer is not None:
                self._head_bytes += len(data)
                if self._head_bytes > max_head_bytes:
                    self._give_up()

        def on_message_begin(self) -> None:
            self._begin_head()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._end_head()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            super().connection_lost(exc)

        def _begin_head(self) -> None:
            self._end_head()
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(head_timeout_s, self._give_up)

        def _end_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _give_up(self) -> None:
            self._end_head()
            self.transport.abort()

    return BoundedHeadProtocol
