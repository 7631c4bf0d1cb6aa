"""A small HTTP server of JSON endpoints, for stand-ins of services."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Answer = tuple[int, Any]
"""Status, and a JSON value or text."""
Endpoint = Callable[[Any, Mapping[str, str]], Awaitable[Answer]]
"""Parsed body (None for none) and query -> answer."""


class JsonServer:
    """Serves endpoints on 127.0.0.1 and a free port.

    Args:
        endpoints: "METHOD /path" -> what answers it.

    Attributes:
        requests: "METHOD /path" and body of every request, in order.
        headers: of the last request, names in lower case.
        url: where it listens; known once started.
    """

    def __init__(self, endpoints: Mapping[str, Endpoint]) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.url = ""
        self._endpoints = dict(endpoints)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self, port: int = 0) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        """Stop, and drop every connection, as a killed process does. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        tasks = [task for task in self._connections if task is not asyncio.current_task()]
        for writer in list(self._connections.values()):
            writer.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        try:
            while await self._serve_one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError, ValueError):
            pass  # the client went away, or the server is closed
        finally:
            self._connections.pop(task, None)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first = (await reader.readline()).decode().split()
        if len(first) < 2:
            return False
        headers: dict[str, str] = {}
        while line := (await reader.readline()).decode().strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        path, _, query = first[1].partition("?")
        key = f"{first[0]} {path}"
        body = json.loads(raw) if raw else None
        self.requests.append((key, body))
        self.headers = headers
        status, found = await self._answer(key, body, query)
        content = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        kind = "text/plain" if isinstance(found, str) else "application/json"
        head = (
            f"HTTP/1.1 {status} -\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        writer.write(head.encode() + content)
        await writer.drain()
        return True

    async def _answer(self, key: str, body: Any, query: str) -> Answer:
        endpoint = self._endpoints.get(key)
        if endpoint is None:
            return 404, {"detail": "Not Found"}
        pairs = (item.partition("=") for item in query.split("&") if item)
        return await endpoint(body, {name: value for name, _, value in pairs})
