"""Runs a tool server until it is told to stop."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from agentrl.errors import ConfigError
from agentrl.sandbox.serving.listening import check_port, http_protocol
from agentrl.tool.serving.app import ToolServer

logger = logging.getLogger(__name__)

_STOPPING = (signal.SIGINT, signal.SIGTERM)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        port: 0 takes a free one.

    Raises:
        ConfigError: the address cannot be had.
    """
    check_port(port)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({error}); choose another port, or "
            "0 for any that is free"
        ) from error


async def serve(
    server: ToolServer, listening: socket.socket, *, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until SIGINT or SIGTERM; then let calls end, and close every session.

    Args:
        ready: told the URL once it answers.
    """
    config = uvicorn.Config(
        server.app,  # pyright: ignore[reportArgumentType]
        http=http_protocol(),
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_keep_alive=120,
        timeout_graceful_shutdown=max(1, round(server.limits.shutdown_timeout_s)),
    )
    process = _Ready(config, ready or (lambda url: None))
    await process.serve(sockets=[listening])


class _Ready(uvicorn.Server):
    """Says when it has started, and returns when it was told to stop.

    uvicorn's own handling ends the process by the signal, before sandboxes are closed.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at the first signal, and do not wait any longer at the second."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {name: signal.signal(name, self.handle_exit) for name in _STOPPING}
        try:
            yield
        finally:
            for name, handler in previous.items():
                signal.signal(name, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say where."""
        await super().startup(sockets)
        host, port = (sockets or [])[0].getsockname()[:2]
        self._ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
