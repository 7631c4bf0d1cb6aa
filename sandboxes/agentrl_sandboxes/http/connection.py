"""One way to a sandbox server: requests with deadlines, and errors of the right kind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from agentrl.errors import AgentRLError, ConfigError, SandboxError, SandboxUnavailable, ToolError
from agentrl.references import cleared
from agentrl.sandbox.secrets import check_reference, resolve

_CONNECT_S = 5.0
_IDLE_S = 30.0
"""Less than the server keeps an idle connection, so that it never closes one under a request."""
_MAX_ANSWER_BYTES = 256 << 20
_UNIX = "unix://"
_ERRORS: dict[str, type[AgentRLError]] = {"tool": ToolError, "config": ConfigError}


def _check_url(url: str) -> None:
    try:
        parsed = httpx.URL(url) if url.isprintable() and " " not in url else httpx.URL()
    except (httpx.InvalidURL, UnicodeError):
        parsed = httpx.URL()
    is_place = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 1) < 2**16
    if not is_place or parsed.userinfo or parsed.query or parsed.fragment:
        shown = "one with a user name in it (not shown)" if "@" in url else f"{url!r:.200}"
        raise ConfigError(
            "sandbox.kwargs.url must be http://HOST:PORT, https://... or unix:///PATH, without "
            f"user name and query, got {shown}"
        )


class NotConnected(SandboxError):
    """The server could not be reached at all: it has not seen the request."""


class UnknownHere(SandboxError):
    """The server has no such sandbox."""


class Connection:
    """Requests to one server; opens connections as calls need them.

    Args:
        url: ``http://host:port``, ``https://…`` or ``unix:///path/of.sock``.
        token: reference to the bearer token, resolved at each request.
    """

    def __init__(self, url: str, token: str | None) -> None:
        uds = url.removeprefix(_UNIX) if url.startswith(_UNIX) else None
        if uds is None:
            _check_url(url)
        self.url = url
        self._token = None if token is None else check_reference("token", token)
        limits = httpx.Limits(max_connections=0, keepalive_expiry=_IDLE_S)  # 0 means no limit
        self._client = httpx.AsyncClient(
            transport=AiohttpTransport(uds=uds, limits=limits),
            base_url="http://server" if uds is not None else url.rstrip("/"),
            trust_env=False,
            follow_redirects=False,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float,
        media_type: str = "application/json",
    ) -> bytes:
        """Send a request; return the body of a successful answer.

        Raises:
            ToolError, ConfigError: the server says that the request was at fault.
            NotConnected: the server was not reached, and has not seen the request.
            SandboxError: anything else: infrastructure.
        """
        headers = {"content-type": media_type, "accept-encoding": "identity"}
        if self._token is not None:
            headers["authorization"] = "Bearer " + resolve("token", self._token)
        try:
            async with asyncio.timeout(timeout_s):
                async with self._client.stream(
                    method,
                    path,
                    content=body,
                    headers=headers,
                    timeout=httpx.Timeout(None, connect=_CONNECT_S),
                ) as answer:
                    content = await self._read(answer)
        except TimeoutError:
            raise SandboxError(
                f"the sandbox server at {self.url} did not answer within {timeout_s:g} s"
            ) from None
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        except (aiohttp.ClientError, OSError) as error:
            raise SandboxError(f"lost the sandbox server at {self.url}: {error!r}") from None
        if answer.is_success:
            return content
        raise self._refused(answer.status_code, content)

    async def ask_json(
        self, method: str, path: str, value: Any = None, *, timeout_s: float
    ) -> dict[str, Any]:
        """Send and receive JSON objects; errors as those of :meth:`ask`."""
        body = b"" if value is None else json.dumps(value).encode()
        raw = self._without_token(await self.ask(method, path, body, timeout_s=timeout_s))
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise SandboxError(
                f"what answers at {self.url} is no sandbox server: {raw[:100]!r} to {path}"
            )
        return found

    async def _read(self, answer: httpx.Response) -> bytes:
        """Read a body of bounded length: what answers may be anything."""
        data = bytearray()
        async for chunk in answer.aiter_raw():
            data += chunk
            if len(data) > _MAX_ANSWER_BYTES:
                raise SandboxError(f"the sandbox server at {self.url} answered without end")
        return bytes(data)

    def _without_token(self, content: bytes) -> bytes:
        """What a server says in words may repeat the token, and is kept."""
        if self._token is None:
            return content
        text = cleared(content.decode("utf-8", "surrogateescape"), [self._token])
        return text.encode("utf-8", "surrogateescape")

    def _lost(self, error: httpx.HTTPError) -> SandboxError:
        # The transport gives one class to refused and to broken connections; its cause tells.
        if isinstance(error.__cause__, (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)):
            return NotConnected(
                f"cannot reach the sandbox server at {self.url}: {error}; start it there with "
                "`agentrl sandbox serve`"
            )
        return SandboxError(f"lost the sandbox server at {self.url}: {error!r}")

    def _refused(self, status: int, content: bytes) -> AgentRLError:
        content = self._without_token(content)
        try:
            told = json.loads(content)["error"]
            kind, message = str(told["type"]), str(told["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            kind, message = "", f"{content[:200]!r}"
        if status == 401:
            return SandboxUnavailable(
                f"the sandbox server at {self.url} "
                + (
                    "wants a token; set sandbox.kwargs.token to a reference to the variable that "
                    "holds it, as in '${env:AGENTRL_SANDBOX_TOKEN}'"
                    if self._token is None
                    else f"refuses the token of {self._token}; set that variable to the server's"
                )
            )
        if kind == "unknown":
            return UnknownHere(message)
        if kind == "unavailable":
            return SandboxUnavailable(message)
        if kind in _ERRORS and status < 500:
            return _ERRORS[kind](message)
        return SandboxError(f"the sandbox server answered {status}: {message}")
