"""The transport of httpx that connects through aiohttp, and only to where a guard allows."""

from __future__ import annotations

import socket
from typing import Any

import aiohttp
import httpx
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from httpx_aiohttp import AiohttpTransport

from agentrl.net.guard import Guard


class _GuardedResolver(AbstractResolver):
    """Looks a name up once; what is connected to is what was checked."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._inner = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return every address; one that is forbidden refuses them all."""
        found = await self._inner.resolve(host, port, family)
        for result in found:
            self._guard.check_address(host, result["host"])
        return found

    async def close(self) -> None:
        """Do nothing."""


class GuardedTransport(httpx.AsyncBaseTransport):
    """Sends one request, without following redirects or keeping cookies.

    Args:
        guard: None lets everything pass, for a server that the user names, and uses the proxy that
            ``HTTPS_PROXY`` and the like name.
        max_connections: requests at once; more wait.
    """

    def __init__(self, guard: Guard | None, *, max_connections: int) -> None:
        self._guard = guard
        self._max_connections = max_connections
        # Made at the first request: aiohttp wants a running loop.
        self._inner = AiohttpTransport(client=self._session)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        if self._guard is not None:
            self._guard.check_url(request.url)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()

    def _session(self) -> aiohttp.ClientSession:
        guarded: dict[str, Any] = {}
        if self._guard is not None:
            guarded["resolver"] = _GuardedResolver(self._guard)
            guarded["socket_factory"] = self._open_socket
        connector = aiohttp.TCPConnector(limit=self._max_connections, **guarded)
        # Cookies would carry state from one trajectory into the next.
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=self._guard is None,  # a proxy would look names up by itself
        )

    def _open_socket(self, found: Any) -> socket.socket:
        """Check the address once more, where no parser stands between it and the connection."""
        family, kind, protocol, _, address = found
        assert self._guard is not None
        self._guard.check_connection(str(address[0]))
        return socket.socket(family=family, type=kind, proto=protocol)
