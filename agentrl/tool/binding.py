"""From specs to what an environment's trajectories call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.sandbox.base import SandboxLimits
from agentrl.tool.base import Tool
from agentrl.tool.breaker import BreakerConfig, CircuitBreaker
from agentrl.tool.deadline import OffLoop
from agentrl.tool.runners.base import Allow
from agentrl.tool.schema import ArgumentValidator
from agentrl.tool.spec import ToolSpec, find_specs, make_runner
from agentrl.tool.workspace import widest


@dataclass(slots=True)
class Binding:
    """A tool that can be called."""

    spec: ToolSpec
    make: Callable[[], Tool]
    """One instance per trajectory."""
    validator: ArgumentValidator
    slots: asyncio.Semaphore
    breaker: CircuitBreaker
    is_stateless: bool
    """It keeps nothing from call to call."""
    overlaps: bool
    """Calls of one turn may run at the same time."""
    overtime_s: float = 0.0
    """See :attr:`agentrl.tool.runners.base.Bound.overtime_s`."""
    workspace_limits: SandboxLimits | None = None
    """What it needs of the workspace."""


class Toolbox:
    """The tools of one environment, shared by all its trajectories in a process.

    Args:
        tools: registered names, paths of YAML specs, or functions marked with ``@tool``.
        replace: tool name to the path of a spec that takes its place (``tools.specs``).
        allow_import: module prefixes that specs outside packs may import.
        allow_command: programs that specs may start (``tools.allow_command``).
        breaker: when a tool that fails on our side is left alone (``tools.breaker``).

    Raises:
        ToolSpecError, RegistryError: a tool cannot be used; found here, not at turn seven.
    """

    def __init__(
        self,
        tools: Sequence[str | Callable[..., Any]] = (),
        *,
        replace: Mapping[str, str] | None = None,
        allow_import: Sequence[str] = (),
        allow_command: Sequence[str] = (),
        breaker: BreakerConfig | None = None,
    ) -> None:
        self.bindings: dict[str, Binding] = {}
        self.off_loop = OffLoop()
        self.state_keys: dict[str, str] = {}
        """Tool name to the entry of ``Env.tools`` that brought it."""
        allow = Allow(imports=tuple(allow_import), commands=tuple(allow_command))
        for entry in tools:
            given = (replace or {}).get(entry, entry) if isinstance(entry, str) else entry
            for spec in find_specs(given, allow=allow):
                if spec.name in self.bindings:
                    raise spec.error(f"the name {spec.name!r} is taken by another tool", "name")
                self.bindings[spec.name] = bind(spec, allow=allow, breaker=breaker)
                self.state_keys[spec.name] = entry if isinstance(entry, str) else spec.name

    @property
    def workspace_limits(self) -> SandboxLimits:
        """The largest of each limit that a tool needs of the workspace."""
        asked = (binding.workspace_limits for binding in self.bindings.values())
        return widest(limits for limits in asked if limits is not None)

    async def cooled(self) -> None:
        """Wait until every tool may be called, or tried: at most ``tools.breaker.cooldown_s``.

        Episodes that begin while a tool is left alone would only fail.
        """
        waits = [binding.breaker.cooling_s for binding in self.bindings.values()]
        if any(waits):
            await asyncio.sleep(max(waits))

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What chat templates take under ``tools``."""
        return [binding.spec.schema for binding in self.bindings.values()]


def bind(
    spec: ToolSpec, *, allow: Allow | None = None, breaker: BreakerConfig | None = None
) -> Binding:
    """Import or connect to what a spec names, and check that it can be called as declared.

    Raises:
        ToolSpecError: not allowed, not importable, not reachable, or of another signature.
    """
    bound = make_runner(spec.runner).bind(spec, allow=allow or Allow())
    return Binding(
        spec=spec,
        make=bound.make,
        validator=ArgumentValidator(spec.parameters),
        slots=asyncio.Semaphore(spec.limits.concurrency),
        breaker=CircuitBreaker(spec.name, breaker),
        is_stateless=bound.stateless,
        workspace_limits=bound.workspace_limits,
        overlaps=bound.stateless and bound.workspace_limits is None,
        overtime_s=bound.overtime_s,
    )
