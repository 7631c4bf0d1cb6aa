"""``mcp:``: tools of an MCP server, which is started for them or reached over streamable HTTP.

::

    mcp:
      command: [mcp-server-time, --local-timezone, UTC]   # or url: https://host/mcp
      env: {TOKEN: "${env:TOKEN}"}     # of the program; with url: headers
      tools: [get_current_time]        # of all that it has; or tool: get_current_time
      prefix: time_                    # before their names
      share: trajectory                # or run: one session for the whole process
      start_timeout_s: 30
      max_bytes: 4000000               # of one message of the server

Without ``tool`` the spec stands for all tools of the server, under the names, descriptions and
parameters that the server gives; with it, for that one, and any of the three may be given beside.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError, InfrastructureError, ToolError, ToolSpecError
from agentrl.extras import missing_extra
from agentrl.net.guard import Guard
from agentrl.tool.background import in_background, wait_in_background
from agentrl.tool.base import ToolContext
from agentrl.tool.runners.base import Allow, Bound, ToolOffer
from agentrl.tool.runners.mcp_program import find_program
from agentrl.tool.runners.mcp_session import McpServer, McpSession
from agentrl.tool.runners.sharing import SharedSessions
from agentrl.tool.secrets import read_texts, unset_in
from agentrl.tool.section import MAX_SECONDS, Section

if TYPE_CHECKING:
    from agentrl.tool.spec import ToolSpec


@dataclass(slots=True, frozen=True, kw_only=True)
class McpTarget:
    """Tools of a server."""

    command: tuple[str, ...]
    """As the spec has it; empty with a URL."""
    server: McpServer
    """Without the program, which is looked up when it is needed."""
    tool: str | None
    """What the server calls it; None for a group."""
    tools: tuple[str, ...] | None
    """Those that are wanted of a group; None for all."""
    prefix: str
    is_kept: bool
    """One session for the process."""


class McpRunner:
    """See the module."""

    schema: Mapping[str, Any] = {
        "type": "object",
        "additionalProperties": False,
        "oneOf": [{"required": ["command"]}, {"required": ["url"]}],
        "properties": {
            "command": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "description": "A program of an installed MCP server, one in this folder "
                "('./server'), or one that tools.allow_command lists; and its arguments.",
            },
            "env": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "Of the program, beyond HOME, PATH and the like; secrets as "
                "${env:NAME}.",
            },
            "url": {"type": "string", "pattern": "^https?://"},
            "headers": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "With url; credentials as ${env:NAME}.",
            },
            "tool": {"type": "string", "description": "The one tool that this spec is about."},
            "tools": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Those of the server's tools that are wanted; all otherwise.",
            },
            "prefix": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_-]*$"},
            "share": {
                "enum": ["trajectory", "run"],
                "default": "trajectory",
                "description": "A session each, so that no state passes from one to another; or "
                "one for all trajectories of a process.",
            },
            "start_timeout_s": {"type": "number", "minimum": 0.1, "default": 30},
            "max_bytes": {"type": "integer", "minimum": 1000, "default": 4_000_000},
        },
    }
    beside: Mapping[str, Mapping[str, Any]] = {}

    def check(self, spec: Section) -> McpTarget:
        """See :class:`agentrl.tool.runners.base.Runner`."""
        section = spec.section("mcp")
        section.refuse_unknown(list(self.schema["properties"]))
        if ("command" in section) == ("url" in section):
            raise section.error(
                "mcp: give either command (a program to start) or url (a server that runs)"
            )
        for key, needs in (("env", "command"), ("headers", "url")):
            if key in section and needs not in section:
                raise section.error(f"mcp.{key} goes with mcp.{needs}", key, at_key=True)
        if "tool" in section and ("tools" in section or "prefix" in section):
            raise section.error(
                "mcp.tool is one tool, mcp.tools and mcp.prefix are about several; keep either",
                "tool",
                at_key=True,
            )
        command = section.texts("command", ())
        if "command" in section and not command:
            raise section.error("mcp.command is empty; name a program", "command")
        server = McpServer(
            arguments=command[1:],
            folder=spec.document.file.parent if command else Path(),
            env=_pairs(section, "env", is_headers=False),
            url=_url(section),
            headers=_pairs(section, "headers", is_headers=True),
            max_bytes=section.integer("max_bytes", 4_000_000, minimum=1000),
            start_timeout_s=section.number(
                "start_timeout_s", 30.0, minimum=0.1, maximum=MAX_SECONDS
            ),
        )
        return McpTarget(
            command=command,
            server=server,
            tool=section.text("tool") if "tool" in section else None,
            tools=section.texts("tools") if "tools" in section else None,
            prefix=section.text("prefix", ""),
            is_kept=section.choice("share", ("trajectory", "run"), "trajectory") == "run",
        )

    def is_group(self, target: McpTarget) -> bool:
        """See :class:`agentrl.tool.runners.base.Runner`."""
        return target.tool is None

    def offers(self, target: McpTarget, *, spec: Section, allow: Allow) -> list[ToolOffer]:
        """See :class:`agentrl.tool.runners.base.Runner`."""
        try:
            server = _found(target, allow)
            offered = _ask(server)
            wanted = (target.tool,) if target.tool is not None else target.tools
            for name in wanted or ():
                if name not in offered:
                    raise ToolSpecError(
                        f"the MCP server {server.label} has no tool {name!r}; it has: "
                        f"{', '.join(offered) or 'none'}"
                    )
        except (ToolSpecError, InfrastructureError) as error:
            raise spec.error(f"mcp: {error}", "mcp") from error
        return [
            ToolOffer(
                name=target.prefix + name,
                description=description or name,
                parameters=parameters,
                target=McpTarget(
                    command=target.command,
                    server=target.server,
                    tool=name,
                    tools=None,
                    prefix="",
                    is_kept=target.is_kept,
                ),
            )
            for name, (description, parameters) in offered.items()
            if wanted is None or name in wanted
        ]

    def bind(self, spec: ToolSpec, *, allow: Allow) -> Bound:
        """See :class:`agentrl.tool.runners.base.Runner`."""
        target: McpTarget = spec.target
        try:
            server = _found(target, allow)
            if target.tool not in _ask(server):
                raise ToolSpecError(f"the MCP server {server.label} has no tool {target.tool!r}")
        except (ToolSpecError, InfrastructureError) as error:
            raise spec.error(f"mcp: {error}", "mcp") from error
        sessions = _sessions(server, target.is_kept)
        key = None if not target.is_kept else "run"
        return Bound(make=partial(_McpTool, target.tool, sessions, key), stateless=False)


class _McpTool:
    """One tool of a server, for one trajectory."""

    def __init__(self, tool: str, sessions: SharedSessions[McpSession], key: str | None) -> None:
        self._tool = tool
        self._sessions = sessions
        self._key = key
        self._session: McpSession | None = None

    async def open(self, context: ToolContext) -> None:
        """Open the session of the trajectory, unless another tool of the server has."""
        self._key = self._key or context.trajectory_id
        await in_background(self._acquire(self._key))

    async def call(self, **arguments: Any) -> str:
        """Ask the server."""
        if self._session is None:
            raise ToolError("the tool is not open")
        return await in_background(self._session.call(self._tool, arguments))

    async def close(self) -> None:
        """Let the session go; the last tool of a trajectory ends it."""
        if self._key is not None:
            await in_background(self._release(self._key))

    # Both on the background loop, so that a caller who is cancelled half-way leaves no session that
    # nobody gives back.

    async def _acquire(self, key: str) -> None:
        self._session = await self._sessions.acquire(key)

    async def _release(self, key: str) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self._sessions.release(key)


def _pairs(section: Section, key: str, *, is_headers: bool) -> tuple[tuple[str, str], ...]:
    if key not in section:
        return ()
    return tuple(read_texts(section, key, is_headers=is_headers).items())


def _url(section: Section) -> str | None:
    if "url" not in section:
        return None
    url = section.text("url")
    try:
        # The host is the user's choice; what is checked is that it can be read in one way only.
        authority = url.partition("://")[2].partition("/")[0].partition("?")[0]
        Guard([authority]).check_url(url)
    except (ToolError, ConfigError) as error:
        raise section.error(f"mcp.url: {error}", "url") from None
    return url


def _found(target: McpTarget, allow: Allow) -> McpServer:
    """Return the server with the program that it is started by."""
    texts = [text for _, text in (*target.server.env, *target.server.headers)]
    unset = unset_in(texts)
    if unset:
        raise ToolSpecError(
            f"the environment variable {unset[0]} is not set; export it where the run starts"
        )
    if not target.command:
        return target.server
    program = find_program(target.command[0], target.server.folder, allow)
    values = {name: getattr(target.server, name) for name in McpServer.__dataclass_fields__}
    return McpServer(**{**values, "program": program})


# ------------------------------------------------------------------ sessions of this process

_offered: dict[McpServer, dict[str, tuple[str, dict[str, Any]]]] = {}
_shared: dict[tuple[McpServer, bool], SharedSessions[McpSession]] = {}


def _sessions(server: McpServer, is_kept: bool) -> SharedSessions[McpSession]:
    key = (server, is_kept)
    if key not in _shared:
        _shared[key] = SharedSessions(partial(McpSession.connect, server), keep=is_kept)
    return _shared[key]


def _ask(server: McpServer) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return description and parameters by name; a server is asked once in a process."""
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise ToolSpecError(missing_extra("mcp", "mcp")) from None
    if server not in _offered:
        patience_s = 2 * server.start_timeout_s + 10.0
        try:
            tools = wait_in_background(_list(server), patience_s)
        except TimeoutError:
            raise InfrastructureError(
                f"the MCP server {server.label} did not list its tools within {patience_s:g} s"
            ) from None
        _offered[server] = {
            tool.name: (
                server.cleared(tool.description or "").strip(),
                json.loads(server.cleared(json.dumps(_without_titles(tool.input_schema)))),
            )
            for tool in tools
        }
    return _offered[server]


async def _list(server: McpServer) -> list[Any]:
    session = await McpSession.connect(server)
    try:
        async with asyncio.timeout(server.start_timeout_s):
            return await session.list_tools()
    finally:
        await session.close()


def _without_titles(schema: Any) -> Any:
    """Leave out the titles that SDKs make of the names: tokens that say nothing."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: (
            {name: _without_titles(inner) for name, inner in value.items()}
            if key in ("properties", "$defs") and isinstance(value, dict)
            else value
            if key in ("default", "const", "enum", "examples")
            else _without_titles(value)
        )
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
