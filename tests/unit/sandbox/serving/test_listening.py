"""What both servers do before a request is one: ports, and heads that never end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
import uvicorn

from agentrl.errors import ConfigError
from agentrl.sandbox.serving.fleet import bind
from agentrl.sandbox.serving.listening import http_protocol
from agentrl.tool.serving.run import listen

pytestmark = pytest.mark.timeout(30)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_out_of_range_is_refused_and_not_wrapped_around(port: int):
    with pytest.raises(ConfigError, match=f"--port {port} must be"):
        bind("127.0.0.1", port, None, has_token=True)
    with pytest.raises(ConfigError, match=f"--port {port} must be"):
        listen("127.0.0.1", port)


async def app(scope, receive, send) -> None:
    """Answer with the length of the body."""
    length, more = 0, True
    while more:
        message = await receive()
        length += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(length).encode()})


def served(
    scenario: Callable[[Callable[[], Awaitable[Streams]]], Awaitable[None]], **bounds: float
) -> None:
    async def main() -> None:
        protocol = http_protocol(**bounds)  # pyright: ignore[reportArgumentType]
        server = uvicorn.Server(
            uvicorn.Config(app, http=protocol, lifespan="off", log_level="error")
        )
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        running = asyncio.create_task(server._serve([listening]))
        try:
            await scenario(lambda: asyncio.open_connection("127.0.0.1", port))
        finally:
            server.should_exit = True
            await running

    asyncio.run(main())


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nX: a"])
def test_a_head_that_does_not_come_to_its_end_ends_the_connection(begun: bytes):
    async def scenario(connect) -> None:
        reader, writer = await connect()
        writer.write(begun)
        assert await until_closed(reader) == b""
        writer.close()

    served(scenario, head_timeout_s=0.2)


def test_a_head_that_is_too_long_ends_the_connection():
    async def scenario(connect) -> None:
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nX: ")
        try:
            for _ in range(1000):
                writer.write(b"a" * 1000)
                await writer.drain()
        except ConnectionError:
            pass
        assert await until_closed(reader) == b""
        writer.close()

    served(scenario, max_head_bytes=10_000)


def test_long_bodies_and_further_requests_of_a_connection_pass():
    async def scenario(connect) -> None:
        reader, writer = await connect()
        for length in (5, 300_000, 0):
            head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
            writer.write(head.encode() + b"a" * length)
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert str(length).encode() in answer.partition(b"\r\n\r\n")[2]
        writer.close()

    served(scenario, max_head_bytes=10_000)
