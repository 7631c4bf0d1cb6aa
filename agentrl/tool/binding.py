"""From a spec to code: where it may come from, and that it takes the arguments it declares."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from agentrl.errors import AgentRLError, ToolSpecError
from agentrl.kwargs import check_kwargs
from agentrl.registry import load_object
from agentrl.tool.base import Tool, ToolContext
from agentrl.tool.deadline import OffLoop
from agentrl.tool.schema import ArgumentValidator
from agentrl.tool.spec import ToolSpec, find_spec, tool_registry


class FunctionTool:
    """A plain function as a tool: no state, nothing to open or close."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.call = function

    async def open(self, context: ToolContext) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class Binding:
    """A tool that can be called."""

    spec: ToolSpec
    make: Callable[[], Tool]
    """One instance per trajectory."""
    validator: ArgumentValidator
    slots: asyncio.Semaphore
    is_function: bool
    """A plain function, which keeps nothing from call to call."""


class Toolbox:
    """The tools of one environment, shared by all its trajectories in a process.

    Args:
        tools: registered names, or paths of YAML specs.
        replace: tool name to the path of a spec that takes its place (``tools.specs``).
        allow_import: module prefixes that specs outside packs may import.

    Raises:
        ToolSpecError, RegistryError: a tool cannot be used; found here, not at turn seven.
    """

    def __init__(
        self,
        tools: Sequence[str] = (),
        *,
        replace: Mapping[str, str] | None = None,
        allow_import: Sequence[str] = (),
    ) -> None:
        self.bindings: dict[str, Binding] = {}
        self.off_loop = OffLoop()
        self.state_keys: dict[str, str] = {}
        """Tool name to the entry of ``Env.tools`` that brought it."""
        for entry in tools:
            spec = find_spec((replace or {}).get(entry, entry))
            if spec.name in self.bindings:
                raise ToolSpecError(f"{spec.path}: the name {spec.name!r} is taken by another tool")
            self.bindings[spec.name] = bind(spec, allow_import=allow_import)
            self.state_keys[spec.name] = entry

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What chat templates take under ``tools``."""
        return [binding.spec.schema for binding in self.bindings.values()]


def bind(spec: ToolSpec, *, allow_import: Sequence[str] = ()) -> Binding:
    """Import what a spec names and check that it can be called as declared.

    Raises:
        ToolSpecError: not allowed, not importable, or of another signature.
    """
    target = _load_target(spec, allow_import)
    make = _factory(target, spec)
    try:
        tool = make()
    except Exception as error:
        raise ToolSpecError(
            f"{spec.path}: constructing {spec.python!r} raised {type(error).__name__}: {error}"
        ) from error
    _check_signature(tool.call, spec)
    return Binding(
        spec=spec,
        make=make,
        validator=ArgumentValidator(spec.parameters),
        slots=asyncio.Semaphore(spec.limits.concurrency),
        is_function=isinstance(tool, FunctionTool),
    )


def _load_target(spec: ToolSpec, allow_import: Sequence[str]) -> Any:
    module, _, name = spec.python.rpartition(":")
    if not module or not name:
        raise ToolSpecError(
            f"{spec.path}: python: {spec.python!r} is no import path; write 'package.module:Name' "
            "or './file.py:Name'"
        )
    if module.endswith(".py"):
        folder = spec.path.parent
        file = (folder / module).resolve()
        if not file.is_relative_to(folder):
            raise ToolSpecError(
                f"{spec.path}: python: {module!r} lies outside the spec's own folder; move it there"
            )
        location = f"{file}:{name}"
    else:
        _check_allowed(spec, module, allow_import)
        location = spec.python
    try:
        return load_object(location, kind=f"{spec.path}: python")
    except AgentRLError as error:
        raise ToolSpecError(str(error)) from error


def _check_allowed(spec: ToolSpec, module: str, allow_import: Sequence[str]) -> None:
    points = entry_points(group=tool_registry.group)
    packs = {point.value.partition(":")[0].partition(".")[0] for point in points}
    allowed = [*sorted(packs), *allow_import]
    if not any(module == prefix or module.startswith(f"{prefix}.") for prefix in allowed):
        raise ToolSpecError(
            f"{spec.path}: python: importing {module!r} is not allowed; put the code beside the "
            f"spec ('./file.py:Name'), or add tools.allow_import=[{module}]. Allowed now: "
            f"{', '.join(allowed) or 'nothing'}"
        )


def _factory(target: Any, spec: ToolSpec) -> Callable[[], Tool]:
    if not callable(target):
        raise ToolSpecError(
            f"{spec.path}: {spec.python!r} is {type(target).__name__}, neither a function nor a "
            "class with open, call and close"
        )
    if not isinstance(target, type):
        return partial(FunctionTool, partial(target, **spec.kwargs) if spec.kwargs else target)
    missing = [name for name in ("open", "call", "close") if not hasattr(target, name)]
    if missing:
        raise ToolSpecError(f"{spec.path}: class {spec.python!r} has no {', '.join(missing)}")
    try:
        check_kwargs(target, spec.kwargs, key="kwargs")
    except AgentRLError as error:
        raise ToolSpecError(f"{spec.path}: {error}") from error
    return partial(target, **spec.kwargs)


def _check_signature(call: Callable[..., Any], spec: ToolSpec) -> None:
    properties = list(spec.parameters.get("properties", {}))
    required = list(spec.parameters.get("required", ()))
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # written in C: has no signature to check
        return
    for names in (properties, required):
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ToolSpecError(
                f"{spec.path}: {spec.python!r} cannot be called with the arguments "
                f"({', '.join(names)}) that parameters declares: {error}"
            ) from error
