"""``server:``: tools that run in a tool server (``agentrl tools serve``), one session a trajectory.

::

    server:
      url: https://tools.example.com:8200
      token: ${env:TOOLS_TOKEN}
      tool: search            # one of its tools; left out: all of them, or those under tools
      tools: [search, lookup]
      prefix: corpus_         # before the names that the model sees

The tools of a trajectory share a session of the server, where they are opened with the same state,
and so a workspace.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.errors import AgentRLError, ConfigError, InfrastructureError, ToolError
from agentrl.net.client import Answer
from agentrl.net.guard import Forbidden, Guard
from agentrl.references import names_in
from agentrl.tool.base import ToolContext, ToolReply
from agentrl.tool.deadline import DeadlinePassed
from agentrl.tool.runners.base import Allow, Bound, ToolOffer
from agentrl.tool.runners.server_session import Server, SessionLost, SharedSession, server_at
from agentrl.tool.secrets import unset_in
from agentrl.tool.section import Section
from agentrl.types import ToolStatus

if TYPE_CHECKING:
    from agentrl.tool.spec import ToolSpec

_LIST_TIMEOUT_S = 20.0
_LATE_S = 2.0
"""Past the limit of a call: the server ends a late tool at the limit, and says so."""
_OVERTIME_S = 4.0
_MAX_LIST_BYTES = 16 * 2**20
_BYTES_PER_TOKEN = 512
"""More than what a server sends of an answer for each token of ``max_output_tokens``, escaped."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ServerTarget:
    """A tool of a server, or all of them."""

    url: str
    token: str | None
    """As ``${env:NAME}``."""
    tool: str | None
    """None: all, or those of ``tools``."""
    tools: tuple[str, ...] = ()
    prefix: str = ""
    stateless: bool = False
    """The server said that it keeps nothing from call to call."""


class ServerRunner:
    """See the module."""

    schema: Mapping[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "required": ["url"],
        "properties": {
            "url": {
                "type": "string",
                "pattern": "^https?://",
                "description": "Where 'agentrl tools serve' listens.",
            },
            "token": {"type": "string", "description": "As ${env:NAME}."},
            "tool": {"type": "string", "description": "One tool; left out: all."},
            "tools": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Of all, only these.",
            },
            "prefix": {
                "type": "string",
                "description": "Before the names that the model sees.",
            },
        },
    }
    beside: Mapping[str, Mapping[str, Any]] = {}

    def check(self, spec: Section) -> ServerTarget:
        """See :class:`agentrl.tool.runners.base.Runner`."""
        section = spec.section("server")
        section.refuse_unknown(list(self.schema["properties"]))
        url = section.text("url").rstrip("/")
        try:
            guard_of(url)
        except (Forbidden, ConfigError) as error:
            raise section.error(f"server.url: {url!r}: {error}", "url") from None
        token = None
        if "token" in section:
            token = section.text("token")
            if token not in {f"${{env:{name}}}" for name in names_in([token])}:
                raise section.error(  # without the value: it may be the secret
                    "server.token: a credential does not belong into a file; export it as an "
                    "environment variable and write '${env:NAME}'",
                    "token",
                )
        tool = section.text("tool") if "tool" in section else None
        for key in ("tools", "prefix"):
            if tool is not None and key in section:
                raise section.error(
                    f"server.{key} belongs to a spec of several tools; leave out {key}, or tool",
                    key,
                    at_key=True,
                )
        return ServerTarget(
            url=url,
            token=token,
            tool=tool,
            tools=section.texts("tools", ()),
            prefix=section.text("prefix", ""),
        )

    def is_group(self, target: ServerTarget) -> bool:
        """A server stands for its tools, unless one is named."""
        return target.tool is None

    def offers(self, target: ServerTarget, *, spec: Section, allow: Allow) -> list[ToolOffer]:
        """Ask the server what it has."""
        try:
            found = _ask_for_tools(target)
            wanted = (target.tool,) if target.tool is not None else target.tools or tuple(found)
            missing = [name for name in wanted if name not in found]
            if missing:
                raise ToolError(
                    f"{target.url} has no tool {missing[0]!r}; it has {', '.join(found) or 'none'}"
                )
        except AgentRLError as error:
            raise spec.error(f"server: {error}", "server") from None
        return [_offer(target, found[name]) for name in wanted]

    def bind(self, spec: ToolSpec, *, allow: Allow) -> Bound:
        """See :class:`agentrl.tool.runners.base.Runner`."""
        target: ServerTarget = spec.target
        unset = unset_in([target.token or ""])
        if unset:
            raise spec.error(
                f"server.token: the environment variable {unset[0]} is not set; export it where "
                "the run starts",
                "server",
                "token",
            )
        server = server_at(target.url, target.token)
        server.add_connections(spec.limits.concurrency)
        name = target.tool or spec.name
        make = partial(
            ServerTool,
            server,
            name,
            timeout_s=spec.limits.timeout_s,
            max_bytes=_BYTES_PER_TOKEN * spec.limits.max_output_tokens + 65_536,
            stateless=target.stateless,
        )
        return Bound(make=make, stateless=target.stateless, overtime_s=_OVERTIME_S)


class ServerTool:
    """A tool of a server, for one trajectory."""

    def __init__(
        self, server: Server, name: str, *, timeout_s: float, max_bytes: int, stateless: bool
    ) -> None:
        self._server = server
        self._name = name
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._stateless = stateless
        self._session: SharedSession | None = None

    async def open(self, context: ToolContext) -> None:
        """Join the trajectory's session."""
        self._session = self._server.join(context)
        await self._session.open(None if self._stateless else self._name)

    async def close(self) -> None:
        """Leave it; the last tool closes it."""
        session, self._session = self._session, None
        if session is not None:
            await self._server.leave(session)

    async def call(self, **arguments: Any) -> ToolReply:
        """Have the server make the call."""
        assert self._session is not None
        body = {"name": self._name, "arguments": arguments, "timeout_s": self._timeout_s}
        used = self._session.id
        try:
            answer = await self._post(body)
        except SessionLost:
            if not self._stateless:
                raise
            await self._session.reopen(used)  # the call was not made: there was nothing to lose
            answer = await self._post(body)
        return _reply(answer, self._server.url)

    async def _post(self, body: dict[str, Any]) -> Answer:
        assert self._session is not None
        return await self._session.request(
            "POST",
            "/calls",
            json=body,
            timeout_s=self._timeout_s + _LATE_S,
            max_bytes=self._max_bytes,
        )


def guard_of(url: str) -> Guard:
    """Return a guard that lets requests to the host of ``url`` pass, and no others.

    Raises:
        ConfigError, Forbidden: it is no URL of a server.
    """
    scheme, separator, rest = url.partition("://")
    authority, slash, _ = rest.partition("/")
    if not separator or slash or "?" in rest or "#" in rest:
        raise ConfigError("write 'https://host:port', without a path")
    guard = Guard([authority], schemes=("https",) if scheme == "https" else ("http", "https"))
    guard.check_url(url)
    return guard


def _ask_for_tools(target: ServerTarget) -> dict[str, Any]:
    """Return the server's own descriptions by name; from any thread, event loop or not."""
    unset = unset_in([target.token or ""])
    if unset:
        raise ConfigError(f"the environment variable {unset[0]} is not set")
    server = Server(target.url, target.token)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            asyncio.run,
            server.get("/v1/tools", timeout_s=_LIST_TIMEOUT_S, max_bytes=_MAX_LIST_BYTES),
        ).result()
    try:
        listed = json.loads(answer.body)["tools"]
        return {str(tool["name"]): tool for tool in listed}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InfrastructureError(
            f"{target.url}/v1/tools answered what is no list of tools: {answer.text[:200]!r}"
        ) from None


def _offer(target: ServerTarget, tool: Mapping[str, Any]) -> ToolOffer:
    given: Any = tool.get("limits")
    limits = given if isinstance(given, dict) else {}
    known = ("timeout_s", "max_calls", "concurrency", "max_output_tokens")
    stateless = tool.get("stateless") is True
    return ToolOffer(
        name=f"{target.prefix}{tool['name']}",
        description=str(tool.get("description", "")),
        parameters=tool.get("parameters", {}),
        target=ServerTarget(
            url=target.url,
            token=target.token,
            tool=str(tool["name"]),
            stateless=stateless,
        ),
        idempotent=tool.get("idempotent") is True,
        limits={name: limits[name] for name in known if _is_limit(limits.get(name))},
    )


def _is_limit(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**31


def _reply(answer: Answer, url: str) -> ToolReply:
    """Return what the tool answered.

    Raises:
        ToolError, DeadlinePassed: as it ended on the server.
        InfrastructureError: it failed there, or what came is no answer of a tool server.
    """
    try:
        value = json.loads(answer.body)
        status, content = ToolStatus(value["status"]), value["content"]
        reward, cut_chars = float(value["reward"]), int(value["cut_chars"])
        cut_short = value.get("cut_short", False)
        if not isinstance(content, str) or answer.is_cut or cut_chars < 0:
            raise ValueError
        if not isinstance(cut_short, bool):
            raise ValueError
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise InfrastructureError(
            f"{url} answered {answer.status} with what is no answer of a tool: "
            f"{answer.text[:100]!r}"
        ) from None
    if status is ToolStatus.INFRA_ERROR:
        raise InfrastructureError(f"{url}: {content[:500]}")
    if status is ToolStatus.TIMEOUT:
        late = DeadlinePassed(content)
        late.note = "; its state is lost" if content.endswith("state is lost") else ""
        raise late
    if status is ToolStatus.ERROR:
        raise ToolError(content.removeprefix("error: "))
    return ToolReply(content=content, reward=reward, cut_chars=cut_chars, cut_short=cut_short)
