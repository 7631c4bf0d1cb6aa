"""Writes docs/configuration.md from the dataclasses: a default and its meaning stand once.

python scripts/configuration_page.py [--check]
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from agentrl.config.keys import config_dir, item_classes, record_classes
from agentrl.config.load import load
from agentrl.config.schema import Config
from agentrl.rollout.engines.config import (
    HFEngineConfig,
    OpenAIEngineConfig,
    SGLangEngineConfig,
    VLLMEngineConfig,
)

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
INTRO = """# Configuration

Any setting is `key=value` after the command: `agentrl train --env code_sandbox trainer.seed=1`.
A group chooses a file of `configs/`: `algo=rloo`. Keys under `kwargs` go to the part they belong to
and are checked against its signature. Unknown keys, wrong types and settings that would train
something else than meant are refused before anything runs.

This page is written by `scripts/configuration_page.py` from the dataclasses that hold the defaults.
`model=tiny`, which holds where no `model.path` is given, changes some of them: its values stand in
the third column where they differ, and all files of `configs/` at the end.
"""


ENGINES = {
    "hf": HFEngineConfig,
    "vllm": VLLMEngineConfig,
    "sglang": SGLangEngineConfig,
    "openai": OpenAIEngineConfig,
}
KWARGS = "rollout.engine.kwargs."
# Set by the run alone: weight_sync.bucket_mb, rollout.tensor_parallel and so on.
REFUSED = {f"{KWARGS}{name}" for name in ("bucket_mb", "tensor_parallel", "gpu_memory_fraction")}
# What an engine has from other settings, unless its own say otherwise.
OF_THE_RUN = {
    f"{KWARGS}max_context": "`rollout.max_context_tokens`",
    f"{KWARGS}deterministic": "`trainer.deterministic`",
    f"{KWARGS}sleep": "as `rollout.sleep_level` wants",
}


def docs_of(cls: type) -> dict[str, str]:
    """Attribute docstrings of a dataclass, its bases included, or of the members of an enum."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base) and base is not cls:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for item, after in zip(body.body, [*body.body[1:], None], strict=True):
            target = item.target if isinstance(item, ast.AnnAssign) else None
            if isinstance(item, ast.Assign):
                target = item.targets[0]
            if isinstance(target, ast.Name):
                text = ""
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    text = " ".join(str(after.value.value).split())
                found[target.id] = text
    return found


def rows(cls: type, tiny: Any, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (key, default, value in ``tiny`` where it differs, meaning).

    Args:
        tiny: settings of the class under ``model=tiny``; None where that changes nothing.

    Raises:
        SystemExit: a field, or a member of an enum, says nothing of its meaning.
    """
    hints, docs = get_type_hints(cls), docs_of(cls)
    for item in dataclasses.fields(cls):
        value, kind, key = default_of(item), hints[item.name], f"{prefix}{item.name}"
        if key in REFUSED:
            continue
        under_tiny = value if tiny is None else getattr(tiny, item.name)
        if dataclasses.is_dataclass(value) and isinstance(kind, type) and item.name != "engine":
            yield from rows(kind, under_tiny, f"{key}.")
            continue
        if not docs[item.name]:
            sys.exit(f"{cls.__name__}.{item.name} has no docstring that says what it means")
        meaning = " ".join([docs[item.name], *choices(kind)])
        changed = shown(under_tiny) if plain(under_tiny) != plain(value) else ""
        is_needed = value is dataclasses.MISSING or (item.name == "id" and not value)
        default = "(to be given)" if is_needed else OF_THE_RUN.get(key) or shown(value)
        yield key, default, changed, meaning


def default_of(item: dataclasses.Field[Any]) -> Any:
    """What holds unless something is given; ``MISSING`` where something has to be."""
    made = item.default_factory
    return item.default if made is dataclasses.MISSING else made()


def choices(kind: Any) -> Iterator[str]:
    """Say what each member of an enum means."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        return
    for name, meaning in docs_of(kind).items():
        if not meaning:
            sys.exit(f"{kind.__name__}.{name} has no docstring that says what it means")
        yield f"`{name}`: {meaning}"


def plain(value: Any) -> Any:
    """A value as YAML holds it, which knows lists and no tuples."""
    return list(value) if isinstance(value, tuple) else value


def shown(value: Any) -> str:
    """A default as it is written on a command line."""
    if dataclasses.is_dataclass(value):
        return f"`{value.id}`"  # type: ignore[attr-defined]
    if value is None:
        return "none"
    if isinstance(value, Enum):
        return f"`{value.name}`"
    return f"`{value}`" if value != "" else "empty"


def section(title: str, cls: type, tiny: Any, prefix: str) -> str:
    """One table."""
    about = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", (inspect.getdoc(cls) or "").split("\n\n")[0])
    lines = [f"## {title}", "", about, ""]
    found = list(rows(cls, tiny, prefix))
    if any(under_tiny for _, _, under_tiny, _ in found):
        lines += ["| key | default | `model=tiny` | meaning |", "|---|---|---|---|"]
        lines += [f"| `{key}` | {a} | {b} | {cell(text)} |" for key, a, b, text in found]
    else:
        lines += ["| key | default | meaning |", "|---|---|---|"]
        lines += [f"| `{key}` | {default} | {cell(text)} |" for key, default, _, text in found]
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text as it may stand in a table of Markdown."""
    return text.replace("``", "`").replace("|", r"\|")


def page() -> str:
    """The whole page."""
    hints = get_type_hints(Config)
    tiny = load(["env.id=any", "model=tiny"])  # no environment is looked up
    tiny.env.id = Config().env.id
    parts = [INTRO]
    for item in dataclasses.fields(Config):
        parts.append(
            section(item.name, hints[item.name], getattr(tiny, item.name), f"{item.name}.")
        )
    for key, cls in item_classes().items():
        parts.append(section(f"Entries of {key}", cls, None, ""))
    for key, cls in record_classes().items():
        parts.append(section(f"{key}.NAME", cls, None, f"{key}.NAME."))
    for name, cls in ENGINES.items():
        parts.append(section(f"rollout.engine, id {name}", cls, None, KWARGS))
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
