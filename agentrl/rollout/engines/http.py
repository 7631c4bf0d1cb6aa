"""JSON over HTTP to an engine's server: one connection pool, a deadline for every answer.

The pool is aiohttp's behind httpx: httpx's own goes through all queued requests for every one that
it serves, which is hundreds of requests in a rollout.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from agentrl.errors import ConfigError, EngineError
from agentrl.headers import why_no_header
from agentrl.references import without_values

if TYPE_CHECKING:
    import httpx

_MAX_ANSWER_BYTES = 256 << 20
"""Of one answer: a million tokens with their log-probabilities take a fifth of it."""


class Unreachable(EngineError):
    """No connection, or one that ended before the answer, or what is no answer of HTTP."""


class NoAnswer(EngineError):
    """No answer before the deadline."""


@dataclass(slots=True, frozen=True)
class Reply:
    """What a server answered."""

    status: int
    body: Any
    """Parsed JSON, or text that is none."""
    retry_after_s: float = 0.0
    """What the server asked for."""
    leads_to: str = ""
    """Where a redirection would go; none is followed."""

    @property
    def text(self) -> str:
        """What to show of it."""
        shown = self.body if isinstance(self.body, str) else json.dumps(self.body)
        leads = f" (leads to {self.leads_to[:200]}: write that as base_url)"
        return f"status {self.status}{leads if self.leads_to else ''}: {shown[:500]}"


class JsonClient:
    """Talks to one server.

    Args:
        base_url: without a slash at its end.
        api_key_env: environment variable that holds the key; None sends none.
        max_connections: requests at once; more wait.

    Raises:
        ConfigError: a URL or key that cannot be used.
    """

    def __init__(self, base_url: str, *, api_key_env: str | None, max_connections: int) -> None:
        if reason := why_no_url(base_url):
            raise ConfigError(f"base_url {reason}: write http://host:port")
        self.base_url = base_url.rstrip("/")
        self._headers = auth_headers(api_key_env)
        self._secrets = [] if api_key_env is None else [api_key_env]
        self._max_connections = max_connections
        self._client: httpx.AsyncClient | None = None

    async def post(self, path: str, body: Any = None, *, timeout_s: float) -> Reply:
        """Send JSON; see :meth:`request`."""
        return await self.request("POST", path, body, timeout_s=timeout_s)

    async def get(self, path: str, *, timeout_s: float) -> Reply:
        """Ask; see :meth:`request`."""
        return await self.request("GET", path, timeout_s=timeout_s)

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float) -> Reply:
        """Return the answer, whatever its status.

        Raises:
            Unreachable: there is no server, or it went away.
            NoAnswer: the answer did not come within ``timeout_s``.
        """
        import httpx
        from aiohttp import ClientError  # what its transport does not translate, such as nonsense

        url, scope = f"{self.base_url}{path}", asyncio.timeout(timeout_s)
        try:
            async with scope, self._connected().stream(method, url, json=body) as response:
                content = await _content(response)
        except (httpx.HTTPError, OSError, ClientError) as error:
            if scope.expired():
                raise NoAnswer(f"{url} did not answer within {timeout_s:g} s") from None
            # The transport calls a connection that was dropped a time-out; there is none but ours.
            raise Unreachable(
                f"{url} cannot be reached: {type(error).__name__}: {str(error)[:300]}"
            ) from error
        text = without_values(content.decode(errors="replace"), self._secrets)  # it may be kept
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = text
        wanted = response.headers.get("retry-after", "")
        wait_s = float(wanted) if wanted.isdecimal() else 0.0
        leads_to = response.headers.get("location", "") if response.is_redirect else ""
        return Reply(response.status_code, found, wait_s, leads_to)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            import httpx
            from httpx_aiohttp import AiohttpTransport

            self._client = httpx.AsyncClient(
                headers=self._headers,
                timeout=None,  # of each request as a whole, above
                transport=AiohttpTransport(
                    limits=httpx.Limits(max_connections=self._max_connections)
                ),
            )
        return self._client


async def _content(response: httpx.Response) -> bytes:
    """Return an answer's bytes, unpacked.

    Raises:
        OSError: there is no end of them.
    """
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > _MAX_ANSWER_BYTES:
            raise OSError(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(content)


def why_no_url(url: str) -> str | None:
    """Return why requests cannot be sent below a URL, without what may be secret; None: they can.

    Args:
        url: of a server, as far as paths may be appended to it.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
    except (ValueError, UnicodeError):
        return f"{url!r} has no host and port" if "@" not in url else "has no host and port"
    if "@" in parts.netloc:
        return "holds a name or a key; leave them out, and name the key's variable in api_key_env"
    if parts.query or parts.fragment or "?" in url or "#" in url:
        return "goes on after the path, with '?' or '#'"
    if parts.scheme not in ("http", "https") or not host or port == 0:
        return f"is {url!r}"
    if not url.isprintable() or " " in url or "\\" in url:
        return f"{url!r} holds blanks or control characters"
    return None


def auth_headers(api_key_env: str | None) -> dict[str, str]:
    """Return the header that carries a key.

    Raises:
        ConfigError: the variable is not set, or no header can carry its value.
    """
    if api_key_env is None:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise ConfigError(
            f"api_key_env={api_key_env!r}: no such environment variable, or it is empty; export "
            "it, or leave api_key_env out for a server without keys"
        )
    if reason := why_no_header(key):
        raise ConfigError(f"api_key_env={api_key_env!r}: the key {reason}")
    return {"Authorization": f"Bearer {key}"}
