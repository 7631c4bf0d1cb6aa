"""Requests to servers that misbehave, on loopback: bounded, in time, and never somewhere else."""

from __future__ import annotations

import asyncio
import gzip
import socket
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentrl.errors import ToolError
from agentrl.net.client import (
    Answer,
    NoAnswer,
    SharedClient,
    Unreachable,
    Unreadable,
    fetch,
    make_client,
)
from agentrl.net.guard import Forbidden, Guard
from agentrl.net.transport import _GuardedResolver

pytestmark = pytest.mark.timeout(30)
Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def respond(status: str, *headers: str, body: bytes = b"", length: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status}", "Connection: close", *headers]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def asked(
    answers: dict[str, bytes | Handler],
    path: str,
    *,
    hosts: Callable[[int], list[str] | None] = lambda port: [f"127.0.0.1:{port}"],
    host: str = "127.0.0.1",
    timeout_s: float = 10.0,
    max_bytes: int = 1000,
    **request: Any,
) -> tuple[Answer, list[bytes]]:
    """Ask a server that answers by path; return the answer and the requests that came."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append(head)
            answer = answers[head.split()[1].decode()]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(head, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def run() -> Answer:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for key, value in answers.items():
            if isinstance(value, bytes):
                answers[key] = value.replace(b"PORT", str(port).encode())
        client = make_client(Guard(hosts(port)))
        try:
            return await fetch(
                client,
                request.pop("method", "GET"),
                f"http://{host}:{port}{path}",
                timeout_s=timeout_s,
                max_bytes=max_bytes,
                max_redirects=3,
                **request,
            )
        finally:
            await client.aclose()
            server.close()

    return asyncio.run(run()), seen


def test_an_answer_is_returned_whatever_its_status():
    answer, seen = asked(
        {"/": respond("404 Gone", "X-A: b", body=b"no")}, "/", headers={"X-C": "d"}
    )
    assert (answer.status, answer.body, answer.is_cut) == (404, b"no", False)
    assert answer.headers["x-a"] == "b"
    assert b"x-c: d" in seen[0].lower()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_is_reached_only_where_it_is_named(host: str):
    answers: dict[str, bytes | Handler] = {"/": respond("200 OK", body=b"hi")}
    answer, _ = asked(answers, "/", host=host, hosts=lambda port: [f"{host}:{port}"])
    assert answer.text == "hi"
    for hosts in (None, ["example.com"], [f"{host}:1"]):
        with pytest.raises(Forbidden):
            asked(answers, "/", host=host, hosts=lambda _, hosts=hosts: hosts)


def test_a_public_name_that_resolves_to_a_private_address_is_not_connected_to(
    monkeypatch: pytest.MonkeyPatch,
):
    """DNS rebinding: what is checked is what is connected to."""

    async def rebound(*_: Any, **__: Any) -> Any:
        return [{"hostname": "h", "host": "127.0.0.1", "port": 0, "family": socket.AF_INET}]

    monkeypatch.setattr("aiohttp.resolver.ThreadedResolver.resolve", rebound)
    with pytest.raises(Forbidden, match="not public"):
        asked({}, "/", host="sub.example.com", hosts=lambda port: [f"*.example.com:{port}"])


def test_a_resolver_that_lies_once_is_caught_at_the_connection(monkeypatch: pytest.MonkeyPatch):
    async def unchecked(*_: Any, **__: Any) -> Any:
        return [
            {
                "hostname": "sub.example.com",
                "host": "127.0.0.1",
                "port": 80,
                "family": socket.AF_INET,
                "proto": 0,
                "flags": 0,
            }
        ]

    monkeypatch.setattr(_GuardedResolver, "resolve", unchecked)
    with pytest.raises(Forbidden, match="connected to"):
        asked({}, "/", host="sub.example.com", hosts=lambda port: [f"*.example.com:{port}"])


def test_redirects_are_followed_where_they_may_go():
    answers: dict[str, bytes | Handler] = {
        "/a": respond("302 Found", "Location: /b"),
        "/b": respond("307 Moved", "Location: http://127.0.0.1:PORT/c"),
        "/c": respond("200 OK", body=b"there"),
    }
    answer, seen = asked(answers, "/a")
    assert answer.text == "there" and answer.url.endswith("/c") and len(seen) == 3


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:6379/",
        "http://169.254.169.254/latest/",
        "http://localhost:PORT/b",
        "file:///etc/passwd",
        "gopher://127.0.0.1:PORT/",
        "http://user@127.0.0.1:PORT/b",
        "//[::1]:PORT/b",
        "http://2130706433:PORT/b",
    ],
)
def test_a_redirect_to_elsewhere_is_refused(location: str):
    answers: dict[str, bytes | Handler] = {
        "/a": respond("302 Found", f"Location: {location}"),
        "/b": respond("200 OK", body=b"secret"),
    }
    with pytest.raises(Forbidden):
        asked(answers, "/a")


def test_a_loop_of_redirects_ends():
    with pytest.raises(ToolError, match="redirects"):
        asked({"/a": respond("302 Found", "Location: /a")}, "/a")


async def _endless(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(respond("200 OK", length=False))
    while True:
        writer.write(b"x" * 10_000)
        await writer.drain()


async def _endless_redirect(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(respond("302 Found", "Location: /b", length=False))
    while True:
        writer.write(b"x" * 10_000)
        await writer.drain()


async def _trickle(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(respond("200 OK", length=False))
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def _silence(_: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


def test_a_body_without_end_is_cut():
    answer, _ = asked({"/": _endless}, "/")
    assert len(answer.body) == 1000 and answer.is_cut


def test_a_redirect_with_a_body_without_end_is_followed_all_the_same():
    answers: dict[str, bytes | Handler] = {
        "/": _endless_redirect,
        "/b": respond("200 OK", body=b"b"),
    }
    assert asked(answers, "/")[0].text == "b"


@pytest.mark.parametrize("handler", [_trickle, _silence])
def test_a_slow_server_is_left_at_the_deadline(handler: Handler):
    with pytest.raises(NoAnswer, match=r"within 0\.3 s"):
        asked({"/": handler}, "/", timeout_s=0.3)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x00\x01garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: " + b"b" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnono",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 4\r\n\r\nnono",
    ],
)
def test_what_is_no_http_is_ours_and_never_an_answer(raw: bytes):
    with pytest.raises(Unreachable):
        asked({"/": raw}, "/")


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_a_compressed_bomb_stays_small(compress: Callable[[bytes], bytes]):
    encoding = "gzip" if compress is gzip.compress else "deflate"
    bomb = compress(b"x" * 20_000_000)
    answer, _ = asked({"/": respond("200 OK", f"Content-Encoding: {encoding}", body=bomb)}, "/")
    assert answer.body == b"x" * 1000 and answer.is_cut
    small = compress(b"hello")
    answer, _ = asked({"/": respond("200 OK", f"Content-Encoding: {encoding}", body=small)}, "/")
    assert answer.body == b"hello" and not answer.is_cut


def test_no_server_is_told_without_what_was_asked():
    async def ask() -> None:
        client = make_client(Guard(["127.0.0.1:1"]))
        try:
            await fetch(
                client,
                "GET",
                "http://127.0.0.1:1/?q=private",
                timeout_s=5,
                max_bytes=1,
                headers={"X-Key": "secret"},
            )
        finally:
            await client.aclose()

    with pytest.raises(Unreachable) as caught:
        asyncio.run(ask())
    assert "http://127.0.0.1:1 " in str(caught.value)
    assert "secret" not in str(caught.value) and "private" not in str(caught.value)


def test_cookies_of_one_answer_are_not_sent_with_the_next():
    answers: dict[str, bytes | Handler] = {
        "/a": respond("302 Found", "Location: /b", "Set-Cookie: id=1; Path=/"),
        "/b": respond("200 OK"),
    }
    _, seen = asked(answers, "/a")
    assert not any(b"cookie" in head.lower() for head in seen)


@pytest.mark.parametrize(
    ("content_type", "body", "text"),
    [
        ("text/plain; charset=latin-1", b"\xe9", "é"),
        ("text/plain", b"\xe9", "�"),
        ("text/plain; charset=no-such", b"a", "a"),
        ("text/plain; charset=punycode", b"a-", "a-"),
        ("text/plain; charset=hex", b"61", "61"),
    ],
)
def test_text_is_decoded_without_ever_failing(content_type: str, body: bytes, text: str):
    headers = {"content-type": content_type}
    answer = Answer(status=200, headers=headers, body=body, is_cut=False, url="http://x")
    assert answer.text == text


def test_a_shared_client_lives_as_long_as_somebody_holds_it():
    made = []

    def make() -> Any:
        made.append(make_client(None))
        return made[-1]

    shared = SharedClient(make)

    async def hold() -> None:
        first, second = shared.acquire(), shared.acquire()
        assert first is second
        await shared.release()
        assert not first.is_closed
        await shared.release()
        assert first.is_closed

    asyncio.run(hold())
    asyncio.run(hold())
    assert len(made) == 2


@pytest.mark.parametrize("host", ["xn--", "a..b", "a" * 300 + ".com"])
def test_a_host_that_is_no_name_is_the_callers_mistake(host: str):
    async def run() -> None:
        client = make_client(Guard())
        try:
            await fetch(client, "GET", f"http://{host}/", timeout_s=5, max_bytes=10)
        finally:
            await client.aclose()

    with pytest.raises(ToolError, match="cannot be read"):
        asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        b"hello",
        respond("200 OK", "X: " + "a" * 100_000),
        respond("200 OK", "Content-Encoding: br", body=b"abcd"),
        respond("200 OK", "Content-Encoding: gzip", body=b"abcd"),
        respond("200 OK", "Content-Length: -1", length=False),
        respond("302 Found", "Location: http://[::1"),
    ],
)
def test_what_cannot_be_read_is_told_apart_from_what_is_away(answer: bytes):
    with pytest.raises(Unreadable):
        asked({"/": answer}, "/")
