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
from agentrl.tool.base import ToolContext, ToolReply
from agentrl.tool.deadline import DeadlinePassed
from agentrl.tool.runners.base import Allow, Bound, ToolOffer
from agentrl.tool.runners.server_session import Server, SessionLost, SharedSession, server_at
from agentrl.tool.secrets import read_texts, unset_in
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
            if not unset_or_set(token):
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
