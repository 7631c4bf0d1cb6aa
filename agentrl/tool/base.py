"""What a tool is: something the model may call, with state for one trajectory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from agentrl.errors import SandboxError
from agentrl.sandbox.base import Sandbox, SandboxProvider


async def _no_workspace() -> Sandbox:
    raise SandboxError(
        "no workspace here: whoever opens the tool must give ToolContext(workspace=...)"
    )


@dataclass(slots=True, kw_only=True)
class ToolContext:
    """What a tool gets when a trajectory opens it."""

    trajectory_id: str
    seed: int
    sandboxes: SandboxProvider
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the environment hands to this tool for this task (``Env.tool_state``)."""
    workspace: Callable[[], Awaitable[Sandbox]] = _no_workspace
    """Returns the sandbox that all tools of the trajectory share, opened at its first use and
    closed after all of them; see :mod:`agentrl.tool.workspace`."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolReply:
    """An answer with more to say of the call: what it pays, and how it ended."""

    content: Any
    """What the model is shown: text, a number, or JSON values."""
    reward: float = 0.0
    """Finite. Weighed by ``algo.reward_weights.tool``; the model does not see it."""
    cut_chars: int = 0
    """Characters that were cut off the end of ``content`` already."""
    cut_short: bool = False
    """Whether a limit of the tool's own ended the work before it was done. An environment sees it
    in :class:`~agentrl.types.ToolResult`; ``content`` must tell the model."""


@runtime_checkable
class Tool(Protocol):
    """One instance per trajectory: ``open`` once, ``call`` many, ``close`` always.

    ``call`` may be sync or async, as may ``open`` and ``close``; sync methods run off the event
    loop. A plain function serves as a tool too: it is called with the arguments.

    Two attributes of instances may say more: ``stateless = True``, for a tool that keeps nothing
    from call to call, as a function does, so that calls of one turn may overlap; and
    ``workspace_limits``, for one that works in the trajectory's workspace (see
    :mod:`agentrl.tool.workspace`).
    """

    def open(self, context: ToolContext) -> Any:
        """Prepare for one trajectory."""
        ...

    def call(self, **arguments: Any) -> Any:
        """Answer one call with text, or with a :class:`ToolReply` where there is more to say.

        Raises:
            ToolError: the model's mistake; the message is shown to it.
            SandboxError, InfrastructureError: ours; the trajectory fails with a status of its own,
                as by any other error of :mod:`agentrl.errors`.
        """
        ...

    def close(self) -> Any:
        """Free everything. Called once, also after a failure or a cancel."""
        ...
