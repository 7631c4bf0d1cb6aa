"""Tool specifications: the YAML that says what a tool is called, takes and may use.

::

    name: calculator
    description: Evaluate an arithmetic expression.
    parameters:                       # JSON Schema of the arguments
      type: object
      properties: {expression: {type: string}}
      required: [expression]
    python: ./tool.py:calculate       # a function, or a class with open, call and close
    kwargs: {}                        # for the class or function
    idempotent: true                  # calling twice does no harm: may be retried
    limits: {timeout_s: 5, max_calls: 32, concurrency: 64, retries: 0, max_output_tokens: 512}

``python:`` names code in the spec's own folder (``./file.py:Name``), in the package of an installed
tool pack, or in a module that ``tools.allow_import`` lists; anything else is refused, since a spec
may come from somewhere else than the code.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from agentrl.errors import ToolSpecError
from agentrl.registry import Registry
from agentrl.tool.schema import check_schema
from agentrl.tool.yaml_io import load_mapping

tool_registry: Registry[Path] = Registry("tool", "agentrl.tools")
"""Tool name to the path of its YAML; an entry point names a ``Path`` in a module."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_UNAVAILABLE = ("http", "mcp")


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolLimits:
    """Limits of one tool, per call unless stated."""

    timeout_s: float = 30.0
    max_calls: int = 64
    """Per trajectory."""
    concurrency: int = 64
    """Calls of this tool at once, over all trajectories of a process."""
    retries: int = 0
    """After an infrastructure failure; needs ``idempotent: true``."""
    max_output_tokens: int = 1024
    """Tokens of an answer that the model is shown; the note of what was cut comes on top."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ToolSpec:
    """A checked tool specification."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    python: str
    """``module:Name``, or ``./file.py:Name`` relative to ``path``."""
    path: Path
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    idempotent: bool = False
    limits: ToolLimits = field(default_factory=ToolLimits)

    @property
    def schema(self) -> dict[str, Any]:
        """What chat templates take under ``tools``."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


def find_spec(tool: str | Path) -> ToolSpec:
    """Return the spec of a registered name, or of the YAML file at a path.

    Raises:
        RegistryError: no tool of that name.
        ToolSpecError: the YAML cannot be used.
    """
    if isinstance(tool, Path) or tool.endswith((".yaml", ".yml")):
        return load_spec(Path(tool))
    path: Any = tool_registry.get(tool)
    if not isinstance(path, Path):
        raise ToolSpecError(
            f"tool {tool!r} is registered as {path!r}; register the pathlib.Path of its YAML"
        )
    return load_spec(path)


def load_spec(path: Path) -> ToolSpec:
    """Read and check a tool's YAML; nothing of it is imported yet.

    Raises:
        ToolSpecError: with the file, and line and column where YAML itself is broken.
    """
    path = path.expanduser().resolve()
    values = load_mapping(path)
    _refuse_unknown(values, [f.name for f in fields(ToolSpec) if f.name != "path"], f"{path}")
    name = _text(values, "name", path)
    if not _NAME.fullmatch(name):
        raise ToolSpecError(
            f"{path}: name {name!r}: use at most 64 letters, digits, '_' and '-', a letter first"
        )
    if "parameters" not in values:
        raise ToolSpecError(f"{path}: parameters is missing; for a tool without any write "
                            "'parameters: {type: object, properties: {}}'")  # fmt: skip
    check_schema(values["parameters"], where=str(path))
    kwargs = values.get("kwargs", {})
    if not isinstance(kwargs, dict):
        raise ToolSpecError(f"{path}: kwargs must be a mapping, got {kwargs!r}")
    idempotent = values.get("idempotent", False)
    if not isinstance(idempotent, bool):
        raise ToolSpecError(f"{path}: idempotent must be true or false, got {idempotent!r}")
    limits = _limits(values.get("limits", {}), path)
    if limits.retries and not idempotent:
        raise ToolSpecError(
            f"{path}: limits.retries={limits.retries} on a tool that is not idempotent would "
            "repeat its effects; set idempotent: true if that does no harm, or retries: 0"
        )
    return ToolSpec(
        name=name,
        description=_text(values, "description", path),
        parameters=values["parameters"],
        python=_text(values, "python", path),
        path=path,
        kwargs=kwargs,
        idempotent=idempotent,
        limits=limits,
    )


def _limits(values: Any, path: Path) -> ToolLimits:
    if not isinstance(values, dict):
        raise ToolSpecError(f"{path}: limits must be a mapping, got {values!r}")
    known = {f.name: f.default for f in fields(ToolLimits)}
    _refuse_unknown(values, list(known), f"{path}: limits")
    for name, value in values.items():
        wanted = (int, float) if isinstance(known[name], float) else (int,)
        smallest = 0 if name == "retries" else 1
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ToolSpecError(f"{path}: limits.{name} must be a number, got {value!r}")
        if not math.isfinite(value) or value < (0.001 if name == "timeout_s" else smallest):
            raise ToolSpecError(f"{path}: limits.{name}={value} must be at least {smallest}")
    return ToolLimits(**values)


def _refuse_unknown(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in values:
        if key in known:
            continue
        if key in _UNAVAILABLE:
            raise ToolSpecError(
                f"{where}: {key!r} tools are not available in this version; name a Python "
                "function or class under 'python:'"
            )
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ToolSpecError(f"{where}: unknown key {key!r}; {hint}known: {', '.join(known)}")


def _text(values: Mapping[str, Any], key: str, path: Path) -> str:
    value = values.get(key)
    if not isinstance(value, str) or not value.strip():
        raise ToolSpecError(f"{path}: {key} must be text, got {value!r}")
    return value.strip()
