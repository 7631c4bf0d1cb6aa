"""What a runner is: one way in which a tool can be run, and how its part of a spec is read.

A spec has exactly one key that names a runner (``python:``, ``http:``, ``mcp:``, ``server:``).
Runners are found by that key in :data:`runner_registry`; a package adds one with an entry point of
the group ``agentrl.tool_runners``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.registry import Registry
from agentrl.sandbox.base import SandboxLimits
from agentrl.tool.base import Tool
from agentrl.tool.section import Section

if TYPE_CHECKING:
    from agentrl.tool.spec import ToolSpec


@dataclass(slots=True, frozen=True, kw_only=True)
class Allow:
    """What specs may do beyond what is safe by itself."""

    imports: Sequence[str] = ()
    """Module prefixes that ``python:`` may name (``tools.allow_import``)."""
    commands: Sequence[str] = ()
    """Programs that ``mcp.command`` may start (``tools.allow_command``)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolOffer:
    """What code or a server says of one of its tools."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    target: Any
    """The runner's target of this tool alone."""
    idempotent: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)
    """Fields of ``ToolLimits`` other than its defaults; the spec's own come first."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Bound:
    """Code that can run a tool."""

    make: Callable[[], Tool]
    """One instance per trajectory. What it raises stops the start of a run."""
    stateless: bool
    """Nothing is kept from call to call, so that an episode may be continued from its middle."""
    workspace_limits: SandboxLimits | None = None
    """What the tool needs of the workspace; see :mod:`agentrl.tool.workspace`."""
    overtime_s: float = 0.0
    """Seconds beyond ``limits.timeout_s`` after which the runner itself tells, by an
    ``InfrastructureError``, that a server is lost. The server is to report a tool that is late."""


class Runner(Protocol):
    """One way to run a tool. Made without arguments; keeps nothing.

    A *target* is the runner's own frozen dataclass: what the spec says, checked. Secrets stay in
    it as ``${env:NAME}`` (see :mod:`agentrl.tool.secrets`).
    """

    schema: Mapping[str, Any]
    """JSON Schema of what stands under the runner's key."""
    beside: Mapping[str, Mapping[str, Any]]
    """Other keys of the spec that belong to this runner, with their JSON Schemas."""

    def check(self, spec: Section) -> Any:
        """Return the target; nothing is imported, started or connected to.

        Args:
            spec: the whole file; ``spec.section(key)`` is the runner's own part.

        Raises:
            ToolSpecError: by ``Section.error``, so with file, line and column.
        """
        ...

    def is_group(self, target: Any) -> bool:
        """Return whether the spec stands for all tools that ``offers`` returns."""
        ...

    def offers(self, target: Any, *, spec: Section, allow: Allow) -> list[ToolOffer]:
        """Return what the code or the server says of its tools: none where it says nothing.

        Called where a spec is a group, or leaves out its name, description or parameters. May be
        called while an event loop runs. Has a deadline of its own.

        Raises:
            ToolSpecError: it cannot be imported, started or reached; with file, line and column.
        """
        ...

    def bind(self, spec: ToolSpec, *, allow: Allow) -> Bound:
        """Return code that runs the tool, checked to take what ``spec.parameters`` declares.

        Raises:
            ToolSpecError: begins with ``spec.where(...)``.
        """
        ...


runner_registry: Registry[Callable[[], Runner]] = Registry(
    "tool runner",
    "agentrl.tool_runners",
    {
        "python": "agentrl.tool.runners.python:PythonRunner",
        "http": "agentrl.tool.runners.http:HttpRunner",
        "mcp": "agentrl.tool.runners.mcp_runner:McpRunner",
        "server": "agentrl.tool.runners.server:ServerRunner",
    },
)
"""Key of a spec to the class of its runner."""
