"""Requests with a deadline, a bounded answer and guarded hops, on httpx's API.

The transport is aiohttp's: httpx's own pool goes through all queued requests for every one that it
serves, which is hundreds of requests in a rollout.
"""

from __future__ import annotations

import asyncio
import codecs
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from agentrl.errors import InfrastructureError, ToolError
from agentrl.net.guard import Guard

if TYPE_CHECKING:
    import httpx


_NO_CHARSETS = ("punycode", "idna", "utf-7", "unicode-escape", "raw-unicode-escape")
"""Codecs of Python that no server means; some take quadratic time."""


class Unreachable(InfrastructureError):
    """No connection, or one that ended before the answer, or an answer that is no HTTP."""


class Unreadable(Unreachable):
    """There is a server, and what it answered is no HTTP, or packed as nobody asked for."""


class NoAnswer(InfrastructureError):
    """No complete answer before the deadline."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Answer:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes
    """Decompressed, at most as many bytes as were allowed."""
    is_cut: bool
    """There was more."""
    url: str
    """Of the last hop."""

    @property
    def text(self) -> str:
        """The body as text; what is none is replaced, never an error."""
        charset = "utf-8"
        for part in self.headers.get("content-type", "").split(";")[1:]:
            name, _, value = part.partition("=")
            if name.strip().lower() == "charset":
                charset = value.strip().strip("\"'")
        try:
            if codecs.lookup(charset).name not in _NO_CHARSETS:
                return self.body.decode(charset, "replace")
        except (LookupError, ValueError):
            pass
        return self.body.decode("utf-8", "replace")


def make_client(
    guard: Guard | None, *, max_connections: int = 64, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Return a client for one event loop; close it with ``aclose``.

    It follows no redirects (:func:`fetch` does, hop by hop), keeps no cookies, has no time limit
    of its own.

    Args:
        guard: where it may connect, by itself and through no proxy; None for a server that the user
            names in the configuration, through the proxy of the environment if there is one.
        max_connections: requests at once; more wait.
        headers: sent with every request.
    """
    import httpx

    from agentrl.net.transport import GuardedTransport

    return httpx.AsyncClient(
        transport=GuardedTransport(guard, max_connections=max_connections),
        headers={"User-Agent": "agentrl", "Accept-Encoding": "gzip, deflate", **(headers or {})},
        cookies=CookieJar(policy=DefaultCookiePolicy(allowed_domains=())),
        follow_redirects=False,
        trust_env=False,
        timeout=None,
    )


async def fetch(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    timeout_s: float,
    max_bytes: int,
    max_redirects: int = 0,
    **request: Any,
) -> Answer:
    """Return the answer, whatever its status.

    Args:
        client: from :func:`make_client`.
        method: as HTTP has it.
        url: absolute.
        timeout_s: for everything, redirects and body included.
        max_bytes: of the decompressed body; the rest is not read.
        max_redirects: hops; each goes through the client's guard.
        request: ``headers``, ``params``, ``json``, ``data``, ``content`` as httpx takes them.

    Raises:
        Forbidden: the guard refuses a hop.
        ToolError: no URL, or too many redirects.
        Unreachable: there is no server, or it went away.
        Unreadable: what it answered cannot be read.
        NoAnswer: the answer was not complete in time.
    """
    import aiohttp
    import httpx

    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            outgoing = client.build_request(method, url, **request)
            for _ in range(max_redirects + 1):
                response = await client.send(outgoing, stream=True)
                try:
                    if response.next_request is None or max_redirects == 0:
                        return await _read(response, max_bytes)
                    outgoing = response.next_request
                    await outgoing.aread()  # the transport sends no empty body then
                finally:
                    await response.aclose()  # without reading what came with a redirect
    except (httpx.InvalidURL, UnicodeError) as error:  # the latter of a host that is no name
        raise ToolError(f"the URL cannot be read: {str(error)[:200]}") from None
    except (httpx.HTTPError, aiohttp.ClientError, zlib.error, OSError) as error:
        # Without the inner error: it can hold the request, and with it the headers.
        if scope.expired():
            raise NoAnswer(f"{_place(url)} did not answer within {timeout_s:g} s") from None
        if isinstance(error, _unreadable()):
            raise Unreadable(f"{_place(url)} answered badly: {_reason(error)}") from None
        raise Unreachable(f"{_place(url)} cannot be reached: {_reason(error)}") from None
    raise ToolError(f"more than {max_redirects} redirects")


async def _read(response: httpx.Response, max_bytes: int) -> Answer:
    body = bytearray()
    chunks = _decoded(response)
    async for chunk in chunks:
        body += chunk
        if len(body) > max_bytes:
            break
    await chunks.aclose()
    return Answer(
        status=response.status_code,
        headers={name.lower(): value for name, value in response.headers.items()},
        body=bytes(body[:max_bytes]),
        is_cut=len(body) > max_bytes,
        url=str(response.url),
    )


async def _decoded(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield the body in pieces of bounded size, however well it was compressed."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        async for chunk in response.aiter_raw():
            yield chunk
        return
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise zlib.error(f"the encoding {encoding[:20]!r} was not asked for")
    inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
    async for chunk in response.aiter_raw():
        while chunk and not inflate.eof:
            yield inflate.decompress(chunk, 65536)
            chunk = inflate.unconsumed_tail


def _unreadable() -> tuple[type[Exception], ...]:
    import aiohttp
    import httpx

    return (
        aiohttp.ClientResponseError,
        httpx.RemoteProtocolError,  # a redirect to what is no URL
        httpx.DecodingError,
        zlib.error,
    )


def _reason(error: Exception) -> str:
    import aiohttp

    if isinstance(error, aiohttp.ClientResponseError):  # quotes what came, which may be a secret
        return "what it answered is no HTTP"
    return str(error)[:200] or type(error).__name__


def _place(url: str) -> str:
    """Return scheme, host and port: the rest may hold what a model or a user wrote."""
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return "the URL"
    return f"{parsed.scheme}://{parsed.netloc.decode('ascii', 'replace').rpartition('@')[2]}"


class SharedClient:
    """One client for all who hold it at a time in an event loop.

    Args:
        make: makes the client.
    """

    def __init__(self, make: Callable[[], httpx.AsyncClient]) -> None:
        self._make = make
        self._held: WeakKeyDictionary[asyncio.AbstractEventLoop, _Held] = WeakKeyDictionary()

    def acquire(self) -> httpx.AsyncClient:
        """Return the client of this event loop. Each is followed by one :meth:`release`."""
        loop = asyncio.get_running_loop()
        held = self._held.get(loop)
        if held is None:
            held = self._held[loop] = _Held(self._make())
        held.num_holders += 1
        return held.client

    async def release(self) -> None:
        """Give it back; the last one closes the connections."""
        loop = asyncio.get_running_loop()
        held = self._held[loop]
        held.num_holders -= 1
        if held.num_holders == 0:
            del self._held[loop]
            await held.client.aclose()


@dataclass(slots=True)
class _Held:
    client: httpx.AsyncClient
    num_holders: int = 0
