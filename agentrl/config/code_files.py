"""Files that settings name: where they lie, and what is in them.

``env.id=./env.py:Env`` is the same text in every folder and after every edit, so a run that goes on
has to know more of the code than the setting says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.config.load import to_dict
from agentrl.config.schema import Config

_SPECS = "tools.specs."


def named_files(config: Config) -> dict[str, Path]:
    """Return the dotted key of every setting that names a file of code, or a tool's spec -> it."""
    found = {key: _file(key, text) for key, text in texts(to_dict(config))}
    return {key: path for key, path in found.items() if path is not None}


def stamped(files: Mapping[str, Path]) -> dict[str, str]:
    """Return a stamp of each file that can be read: ``DIGEST PATH``, 16 hexadecimal digits first.

    One that cannot is left out: whoever loads it says what is wrong.
    """
    stamps: dict[str, str] = {}
    for name, path in files.items():
        try:
            digest = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        except OSError:
            continue
        stamps[name] = f"{digest} {path}"
    return stamps


def has_same_content(one: str, other: str) -> bool:
    """Whether two stamps are of one content, wherever it lies."""
    return one.partition(" ")[0] == other.partition(" ")[0]


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of every setting that is a text."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from texts(inner, f"{key}[{index}]")


def _file(key: str, text: str) -> Path | None:
    """Return the file that ``./file.py:Name``, or the path of a spec, names; None for other text.

    The working directory decides, as where it is loaded.
    """
    name = text if key.startswith(_SPECS) else text.rpartition(":")[0]
    if not name.endswith((".yaml", ".yml") if key.startswith(_SPECS) else ".py"):
        return None
    try:
        path = Path(name).expanduser().resolve()
        return path if path.is_file() else None
    except (OSError, RuntimeError, ValueError):  # a loop of links, no such user, a NUL
        return None
