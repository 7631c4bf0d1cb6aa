"""``python: ./file.py:Name``: a function, or a class with open, call and close, in this process.

The code is in the spec's own folder, in the package of an installed tool pack, or in a module that
``tools.allow_import`` lists; anything else is refused, since a spec may come from somewhere else
than the code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

from agentrl.errors import AgentRLError, ToolSpecError
from agentrl.kwargs import check_kwargs
from agentrl.registry import load_object
from agentrl.tool.base import Tool, ToolContext
from agentrl.tool.deadline import contained_call
from agentrl.tool.decorator import offer_of
from agentrl.tool.runners.base import Allow, Bound, ToolOffer
from agentrl.tool.section import Section

if TYPE_CHECKING:
    from agentrl.tool.spec import ToolSpec

_PACK_GROUP = "agentrl.tools"


@dataclass(slots=True, frozen=True, kw_only=True)
class PythonTarget:
    """Code to import."""

    location: str
    """``module:Name``, or ``./file.py:Name`` relative to the spec."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For the class or function."""
    function: Callable[..., Any] | None = None
    """The code itself, where it was given as an object: nothing is imported then."""


class FunctionTool:
    """A plain function as a tool: no state, nothing to open or close."""

    stateless = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.call = function

    async def open(self, context: ToolContext) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class PythonRunner:
    """See the module."""

    schema: Mapping[str, Any] = {
        "type": "string",
        "pattern": r"^.+:[A-Za-z_][A-Za-z0-9_.]*$",
        "description": "'./file.py:Name' beside this file, or 'package.module:Name' of a tool pack "
        "or of a module that tools.allow_import lists: a function, or a class with open, call and "
        "close.",
    }
    beside: Mapping[str, Mapping[str, Any]] = {
        "kwargs": {
            "type": "object",
            "description": "Arguments of the class or function that python names.",
        }
    }

    def check(self, spec: Section) -> PythonTarget:
        """See :class:`agentrl.tool.runners.base.Runner`."""
        location = spec.text("python")
        module, _, name = location.rpartition(":")
        if not module or not name:
            raise spec.error(
                f"python: {location!r} is no import path; write 'package.module:Name' or "
                "'./file.py:Name'",
                "python",
            )
        return PythonTarget(location=location, kwargs=spec.mapping("kwargs"))

    def is_group(self, target: PythonTarget) -> bool:
        """Code is one tool."""
        return False

    def offers(self, target: PythonTarget, *, spec: Section, allow: Allow) -> list[ToolOffer]:
        """Return what a function marked with ``@tool`` says; nothing for other code."""
        try:
            found = _load(target, spec.document.file.parent, allow)
            offer = offer_of(found)
        except AgentRLError as error:
            raise spec.error(str(error), "python") from error
        return [] if offer is None else [offer]

    def bind(self, spec: ToolSpec, *, allow: Allow) -> Bound:
        """See :class:`agentrl.tool.runners.base.Runner`."""
        target: PythonTarget = spec.target
        try:
            found = target.function or _load(target, spec.path.parent, allow)
            make = _factory(found, target)
        except AgentRLError as error:
            raise spec.error(str(error), "python") from error
        try:
            tool = contained_call(make)
        except Exception as error:
            raise spec.error(
                f"constructing {target.location!r} raised {type(error).__name__}: {error}", "python"
            ) from error
        _check_signature(tool.call, spec)
        return Bound(
            make=make,
            stateless=getattr(tool, "stateless", False),
            workspace_limits=getattr(tool, "workspace_limits", None),
        )


def _load(target: PythonTarget, folder: Path, allow: Allow) -> Any:
    module, _, name = target.location.rpartition(":")
    if module.endswith(".py"):
        file = (folder / module).resolve()
        if not file.is_relative_to(folder):
            raise ToolSpecError(
                f"python: {module!r} lies outside the spec's own folder; move it there"
            )
        found = load_object(f"{file}:{name}", kind="python")
    else:
        _check_allowed(module, allow)
        found = load_object(target.location, kind="python")
    # What an allowed module merely imports is not of that module: its "os.system" is of os.
    if isinstance(found, (type, FunctionType, BuiltinFunctionType)):
        home = str(found.__module__)
        if not _is_in(home, folder):
            _check_allowed(home, allow)
    return found


def _is_in(module: str, folder: Path) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and Path(file).resolve().is_relative_to(folder)


def _check_allowed(module: str, allow: Allow) -> None:
    points = entry_points(group=_PACK_GROUP)
    packs = {point.value.partition(":")[0].partition(".")[0] for point in points}
    allowed = [*sorted(packs), *allow.imports]
    if not any(module == prefix or module.startswith(f"{prefix}.") for prefix in allowed):
        raise ToolSpecError(
            f"python: importing {module!r} is not allowed; put the code beside the spec "
            f"('./file.py:Name'), or add tools.allow_import=[{module}]. Allowed now: "
            f"{', '.join(allowed) or 'nothing'}"
        )


def _factory(found: Any, target: PythonTarget) -> Callable[[], Tool]:
    if not callable(found):
        raise ToolSpecError(
            f"{target.location!r} is {type(found).__name__}, neither a function nor a class with "
            "open, call and close"
        )
    if not isinstance(found, type):
        return partial(FunctionTool, partial(found, **target.kwargs) if target.kwargs else found)
    missing = [name for name in ("open", "call", "close") if not hasattr(found, name)]
    if missing:
        raise ToolSpecError(f"class {target.location!r} has no {', '.join(missing)}")
    check_kwargs(found, target.kwargs, key="kwargs")
    return partial(found, **target.kwargs)


def _check_signature(call: Callable[..., Any], spec: ToolSpec) -> None:
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise spec.error(
            f"{spec.target.location!r} yields its answer in parts; return it as a whole", "python"
        )
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
            raise spec.error(
                f"{spec.target.location!r} cannot be called with the arguments "
                f"({', '.join(names)}) that parameters declares: {error}",
                "parameters",
            ) from error
