"""Which program a spec may start as an MCP server."""

from __future__ import annotations

import re
import shutil
import sys
from importlib.metadata import entry_points
from pathlib import Path

from agentrl.errors import ToolSpecError
from agentrl.tool.runners.base import Allow

_SDKS = re.compile(r"(mcp|fastmcp)(?![A-Za-z0-9_.-])", re.IGNORECASE)


def find_program(name: str, folder: Path, allow: Allow) -> str:
    """Return the path of a program that a spec may start.

    Raises:
        ToolSpecError: it may not, or is not there.
    """
    path: str | None = None
    if name in allow.commands:
        path = shutil.which(name)
    elif "/" in name:
        file = (folder / name).resolve()
        if not file.is_relative_to(folder):
            raise ToolSpecError(_not_allowed(name))
        path = shutil.which(str(file))
    elif _is_server(name):
        beside = Path(sys.executable).with_name(name)  # of this environment, whatever PATH says
        path = shutil.which(str(beside)) or shutil.which(name)
    else:
        raise ToolSpecError(_not_allowed(name))
    if path is None:
        raise ToolSpecError(f"there is no program {name!r} that could be run")
    return path


def _not_allowed(name: str) -> str:
    is_there = "/" in name or shutil.which(name) is not None
    return (
        f"starting {name!r} is not allowed: it is neither a program of an installed MCP server nor "
        "in the spec's own folder; "
        + ("" if is_there else "there is no such program here: install its package, or ")
        + f"set tools.allow_command=[{name}] (--allow-command {name}) if that is what you want"
    )


def _is_server(name: str) -> bool:
    """Return whether a program belongs to an installed package that uses the SDK of MCP.

    Not any installed program: with an interpreter or a shell the spec could hold code.
    """
    for point in entry_points(group="console_scripts", name=name):
        for requirement in (point.dist.requires or ()) if point.dist else ():
            if _SDKS.match(requirement) and "extra ==" not in requirement:
                return True
    return False
