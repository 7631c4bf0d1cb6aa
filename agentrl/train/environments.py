"""The environments of a run, made: settings, an instance to ask, and the tools."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.env.base import Env
from agentrl.env.config import EnvConfig
from agentrl.env.entries import EnvEntry, environments
from agentrl.env.registry import make_env
from agentrl.env.validate import check_tools
from agentrl.errors import ConfigError
from agentrl.tool.binding import Toolbox
from agentrl.tool.config import ToolsConfig
from agentrl.tool.runners.python import PythonTarget
from agentrl.tool.spec import ToolSpec


@dataclass(slots=True, frozen=True, kw_only=True)
class Environment:
    """One environment of a run."""

    entry: EnvEntry
    env: Any
    """An instance that is asked for tasks and demonstrations; episodes get their own."""
    toolbox: Toolbox

    @property
    def name(self) -> str:
        """What metrics and trajectories call it."""
        return self.entry.name


def make_environments(config: EnvConfig, tools: ToolsConfig | None = None) -> list[Environment]:
    """Make every environment of a run; one for a run without a mix.

    Raises:
        RegistryError, ConfigError, EnvError, ToolSpecError: one of them, or a tool of it, cannot
            be used.
    """
    tools = tools or ToolsConfig()
    made = []
    for entry in environments(config):
        env = make_env(entry.config.id, entry.config.kwargs, key=f"{entry.key}.kwargs")
        toolbox = Toolbox(
            check_tools(env.tools, env=f"environment {entry.config.id!r}"),
            replace=tools.specs,
            allow_import=tools.allow_import,
            allow_command=tools.allow_command,
            breaker=tools.breaker,
        )
        made.append(Environment(entry=entry, env=env, toolbox=toolbox))
    return made


def refuse_idle_specs(made: Sequence[Environment], specs: Mapping[str, str]) -> None:
    """Refuse to replace a tool that no environment has: the one that was meant would go on.

    Args:
        specs: ``tools.specs``.

    Raises:
        ConfigError: with the nearest tool.
    """
    names = sorted({tool for item in made for tool in item.toolbox.state_keys.values()})
    for tool, path in specs.items():
        if tool not in names:
            close = difflib.get_close_matches(tool, names, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"tools.specs.{tool}={path!r}: there is no tool {tool!r} that it could replace in "
                f"{', '.join(item.name for item in made)}; {hint}"
                f"known: {', '.join(names) or 'none'}"
            )


def code_files(made: Sequence[Environment], specs: Mapping[str, str]) -> dict[str, Path]:
    """Return the files of environments and tools that are named by a path or an import path.

    What is registered comes with its pack, and agentrl's own code with its version.

    Args:
        specs: ``tools.specs``.
    """
    found: dict[str, Path] = {}
    for item in made:
        home = type(item.env).__module__
        file = getattr(sys.modules.get(home), "__file__", None)
        if ":" in item.entry.config.id and file and not home.startswith("agentrl."):
            found[f"{item.entry.key}.id"] = Path(file).resolve()
        for name, binding in item.toolbox.bindings.items():
            entry = item.toolbox.state_keys[name]
            given = specs.get(entry, entry)
            if given.endswith((".yaml", ".yml")) or ":" in given:
                found |= _tool_files(binding.spec, f"the tool {name} of {item.name}")
    return found


def _tool_files(spec: ToolSpec, label: str) -> dict[str, Path]:
    """Return where a spec stands, and the code that lies beside it."""
    found = {label: spec.path}
    location = spec.target.location if isinstance(spec.target, PythonTarget) else ""
    if (file := location.rpartition(":")[0]).endswith(".py"):
        found[f"{label} (python)"] = (spec.path.parent / file).resolve()
    return found


def need_sandboxes(environments: Sequence[Environment]) -> bool:
    """Whether the first episode would be too late to find that there are no sandboxes."""
    return any(isinstance(item.env, Env) and item.env.sandboxed for item in environments)
