"""Writes docs/configuration.md from the dataclasses: a default and its meaning stand once.

python scripts/configuration_page.py [--check]
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from agentrl.config.load import config_dir
from agentrl.config.schema import Config
from agentrl.rollout.engines.config import HFEngineConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
INTRO = """# Configuration

Any setting is `key=value` after the command: `agentrl train --env code_sandbox trainer.seed=1`.
A group chooses a file of `configs/`: `algo=rloo`. Keys under `kwargs` go to the part they belong to
and are checked against its signature. Unknown keys, wrong types and settings that would train
something else than meant are refused before anything runs.

This page is written by `scripts/configuration_page.py` from the dataclasses that hold the defaults.
`model=tiny`, the default, changes some of them: see the end.
"""


def docs_of(cls: type) -> dict[str, str]:
    """Attribute docstrings of a dataclass, its bases included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for item, after in zip(body.body, [*body.body[1:], None], strict=True):
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                text = ""
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    text = " ".join(str(after.value.value).split())
                found[item.target.id] = text
    return found


def rows(cls: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (key, default, meaning)."""
    hints, docs = get_type_hints(cls), docs_of(cls)
    instance = cls()
    for item in dataclasses.fields(cls):
        value, kind = getattr(instance, item.name), hints[item.name]
        if dataclasses.is_dataclass(value) and isinstance(kind, type) and item.name != "engine":
            yield from rows(kind, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", shown(value), docs[item.name]


def shown(value: Any) -> str:
    """A default as it is written on a command line."""
    if dataclasses.is_dataclass(value):
        return f"`{value.id}`"  # type: ignore[attr-defined]
    if value is None:
        return "none"
    if isinstance(value, Enum):
        return f"`{value.name}`"
    return f"`{value}`" if value != "" else "(to be given)"


def section(title: str, cls: type, prefix: str) -> str:
    """One table."""
    lines = [f"## {title}", "", (inspect.getdoc(cls) or "").split("\n\n")[0], ""]
    lines += ["| key | default | meaning |", "|---|---|---|"]
    lines += [
        f"| `{key}` | {default} | {meaning.replace('|', chr(92) + '|')} |"
        for key, default, meaning in rows(cls, prefix)
    ]
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    hints = get_type_hints(Config)
    parts = [INTRO]
    for item in dataclasses.fields(Config):
        parts.append(section(item.name, hints[item.name], f"{item.name}."))
    parts.append(section("rollout.engine, id hf", HFEngineConfig, "rollout.engine.kwargs."))
    parts.append("## Choices\n")
    for path in sorted(config_dir().glob("*/*.yaml")):
        parts.append(
            f"`{path.parent.name}={path.stem}`\n\n```yaml\n{path.read_text().strip()}\n```"
        )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    """Write the page, or check that it is current."""
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != page():
            sys.exit("docs/configuration.md is not current: run scripts/configuration_page.py")
        return
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
