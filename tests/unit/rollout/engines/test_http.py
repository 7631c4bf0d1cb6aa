"""What a server may send that is no answer, and where none can be: an error of ours each time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agentrl.errors import ConfigError
from agentrl.rollout.engines import http
from agentrl.rollout.engines.http import JsonClient, Reply, Unreachable

pytestmark = pytest.mark.timeout(60)


def ask(raw: bytes, *, timeout_s: float = 20.0) -> Reply:
    """Return what the client makes of bytes that a server sends before it hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    async def body(url: str) -> Reply:
        client = JsonClient(url, api_key_env=None, max_connections=4)
        try:
            return await client.get("/x", timeout_s=timeout_s)
        finally:
            await client.close()

    return asyncio.run(_at_server(answer, body))


async def _at_server(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    body: Callable[[str], Awaitable[Reply]],
) -> Reply:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        return await body(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


def reply(content: bytes, *head: str, status: int = 200) -> bytes:
    lines = [f"HTTP/1.1 {status} -", *head, f"Content-Length: {len(content)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 -\r\nContent-Length: -5\r\n\r\n{}",
        b"HTTP/1.1 200 -\r\nContent-Length: 1000\r\n\r\n{",
        b"HTTP/1.1 200 -\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 -\r\nX: " + b"a" * 200_000 + b"\r\nContent-Length: 2\r\n\r\n{}",
        reply(b"not packed", "Content-Encoding: gzip"),
    ],
)
def test_what_is_no_answer_of_http_is_a_server_that_cannot_be_reached(raw: bytes) -> None:
    with pytest.raises(Unreachable, match="cannot be reached"):
        ask(raw)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff\xfe{", b"1" * 6000, b'{"a": ', b""], ids=len
)
def test_what_is_no_json_is_text(content: bytes) -> None:
    found = ask(reply(content, "Content-Type: application/json; charset=none-such"))
    assert isinstance(found.body, str) and len(found.text) < 600


def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_MAX_ANSWER_BYTES", 1000)
    assert ask(reply(b"1" * 1000)).status == 200
    with pytest.raises(Unreachable, match="more than 1000 bytes"):
        ask(reply(b"1" * 1001))


def test_a_redirection_is_not_followed_and_says_where_it_leads() -> None:
    found = ask(reply(b"", "Location: http://elsewhere/v1", status=307))
    assert "status 307" in found.text and "http://elsewhere/v1" in found.text


@pytest.mark.parametrize(
    "url",
    [
        "somewhere:80",
        "http://",
        "http://host:99999",
        "http://host:-1",
        "http://host:port",
        "http://[::1",
        "http://a b",
        "http://a\x00b",
        "http://user:secret@host",
        "http://host/v1?key=secret",
        "http://host/v1#part",
        f"http://{'a' * 70}.com",
    ],
)
def test_a_url_that_leads_nowhere_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url") as caught:
        JsonClient(url, api_key_env=None, max_connections=4)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://host", "https://[::1]:8000/v1/", "http://10.0.0.1:80"])
def test_a_url_that_may_lead_somewhere_is_not(url: str) -> None:
    assert JsonClient(url, api_key_env=None, max_connections=4).base_url == url.rstrip("/")
