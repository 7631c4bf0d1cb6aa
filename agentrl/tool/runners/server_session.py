"""Sessions with tool servers: one per server and trajectory, shared by the tools of both."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentrl.errors import AgentRLError, InfrastructureError, ToolError
from agentrl.net.client import Answer, SharedClient, fetch, make_client
from agentrl.net.guard import Guard
from agentrl.references import cleared
from agentrl.tool.base import ToolContext
from agentrl.tool.secrets import resolved_headers

logger = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 28.0
"""Less than the executor's deadline of ``Tool.open``, so that a server that is lost is named."""
_CLOSE_TIMEOUT_S = 4.0
_MAX_BYTES = 65_536
AFFINITY_HEADER = "Agentrl-Affinity"
"""By which a load balancer tells which requests must reach one process."""
_SPARE_CONNECTIONS = 16
"""For opening and closing, beside calls."""


class SessionLost(InfrastructureError):
    """The server does not know the session any more; the call was not made."""


class Server:
    """A tool server, for all trajectories of a process.

    Args:
        url: without a path.
        token: as ``${env:NAME}``; looked up for every request.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url
        self._token = token
        self._num_connections = _SPARE_CONNECTIONS
        self._guard = Guard([url.partition("://")[2]])
        self._clients = SharedClient(self._make_client)
        self._sessions: dict[tuple[str, str], SharedSession] = {}

    def add_connections(self, number: int) -> None:
        """Allow for as many calls at once: one that waited for a connection would seem lost."""
        self._num_connections += number

    def join(self, context: ToolContext) -> SharedSession:
        """Return the session of a trajectory; each join is followed by one :meth:`leave`.

        Raises:
            InfrastructureError: the environment's state for the tool is no JSON.
        """
        try:
            state = json.dumps(dict(context.state), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise InfrastructureError(
                f"tool_state for a tool of {self.url} must be JSON values: {error}"
            ) from None
        key = (context.trajectory_id, state)
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = SharedSession(self, key, context.seed)
            session.client = self._clients.acquire()
        session.num_holders += 1
        return session

    async def leave(self, session: SharedSession) -> None:
        """Give a session back; the last one closes it."""
        session.num_holders -= 1
        if session.num_holders:
            return
        self._sessions.pop(session.key, None)
        try:
            await session.end()
        finally:
            await self._clients.release()

    async def get(self, path: str, *, timeout_s: float, max_bytes: int) -> Answer:
        """Ask for something, with a client of its own.

        Raises:
            InfrastructureError: no answer, or a refusal.
        """
        client = self._make_client()
        try:
            return await self.request(client, "GET", path, timeout_s=timeout_s, max_bytes=max_bytes)
        finally:
            await client.aclose()

    async def request(
        self, client: Any, method: str, path: str, *, affinity: str = "", **request: Any
    ) -> Answer:
        """Send a request; return the answer where it is one of success.

        Args:
            affinity: the same for all requests of a session.

        Raises:
            SessionLost: the server knows no such session of ours.
            ToolError: the arguments are too large for it.
            InfrastructureError: no answer, or a refusal.
        """
        headers = {AFFINITY_HEADER: affinity} if affinity else {}
        if self._token is not None:
            headers |= resolved_headers({"Authorization": f"Bearer {self._token}"})
        answer = self._without_token(
            await fetch(client, method, f"{self.url}{path}", headers=headers, **request)
        )
        if answer.status < 300:
            return answer
        text = answer.text[:300]
        if answer.status == 403 and "session" in path:
            raise SessionLost(f"{self.url} lost the session: {text}")
        if answer.status == 413 and "calls" in path:
            raise ToolError("the arguments are too large for this tool; send less")
        raise InfrastructureError(f"{self.url} answered {answer.status}: {text}")

    def _without_token(self, answer: Answer) -> Answer:
        """Return an answer, which may repeat the token, as it may be shown and kept."""
        if self._token is None:
            return answer
        text = cleared(answer.body.decode("utf-8", "surrogateescape"), [self._token])
        return replace(answer, body=text.encode("utf-8", "surrogateescape"))

    def _make_client(self) -> Any:
        return make_client(self._guard, max_connections=self._num_connections)


class SharedSession:
    """The tools of one trajectory on one server. Made by :meth:`Server.join`."""

    def __init__(self, server: Server, key: tuple[str, str], seed: int) -> None:
        self.key = key
        self.num_holders = 0
        self.client: Any = None
        self._server = server
        self._seed = seed
        self._affinity = secrets.token_hex(8)
        self._id: str | None = None
        self._opening = asyncio.Lock()

    async def open(self, tool: str | None) -> None:
        """Open it on the server, unless it is, and a tool in it.

        Args:
            tool: None where nothing is gained by opening it ahead.

        Raises:
            InfrastructureError: the server cannot be reached, refuses, or speaks otherwise.
        """
        async with self._opening:
            if self._id is None:
                self._id = await self._open()
        if tool is not None:
            # Apart from its first call, whose deadline is not meant for it.
            await self.request(
                "POST", f"/tools/{tool}", timeout_s=_OPEN_TIMEOUT_S, max_bytes=_MAX_BYTES
            )

    @property
    def id(self) -> str | None:
        """What the server calls it now; None before it is open."""
        return self._id

    async def reopen(self, lost: str | None) -> None:
        """Open it anew, where the server has lost it.

        Args:
            lost: the id that the server does not know. Of several calls that find out at the same
                time the first opens the session for all.
        """
        async with self._opening:
            if self._id == lost:
                self._id = await self._open()

    async def request(self, method: str, path: str, **request: Any) -> Answer:
        """Send a request about this session; see :meth:`Server.request`."""
        target = f"/v1/sessions/{self._id}{path}"
        return await self._server.request(
            self.client, method, target, affinity=self._affinity, **request
        )

    async def end(self) -> None:
        """Close it on the server, as far as that can be reached: it closes idle ones itself."""
        if self._id is None:
            return
        try:
            await self.request("DELETE", "", timeout_s=_CLOSE_TIMEOUT_S, max_bytes=_MAX_BYTES)
        except AgentRLError as error:
            logger.warning("closing a session of %s failed: %s", self._server.url, error)

    async def _open(self) -> str:
        answer = await self._server.request(
            self.client,
            "POST",
            "/v1/sessions",
            affinity=self._affinity,
            json={"seed": self._seed, "state": json.loads(self.key[1])},
            timeout_s=_OPEN_TIMEOUT_S,
            max_bytes=_MAX_BYTES,
        )
        try:
            found: Mapping[str, Any] = json.loads(answer.body)
            session = found["session"]
        except (ValueError, KeyError, TypeError, RecursionError):
            session = None
        if not isinstance(session, str) or not session.replace("-", "").replace("_", "").isalnum():
            raise InfrastructureError(
                f"{self._server.url} opened a session with what is no answer of a tool server: "
                f"{answer.text[:100]!r}"
            )
        return session


_servers: dict[tuple[str, str | None], Server] = {}


def server_at(url: str, token: str | None) -> Server:
    """Return the server of this process at a URL: its tools share connections and sessions."""
    return _servers.setdefault((url, token), Server(url, token))
