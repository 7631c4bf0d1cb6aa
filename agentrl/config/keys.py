"""Which settings there are: their dotted keys, and the files that fill whole sections."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import agentrl
from agentrl.config.schema import Config
from agentrl.errors import ConfigError


def config_dir() -> Path:
    """Return the folder of YAML choices: packaged in a wheel, beside the package in a checkout."""
    package = Path(agentrl.__file__).parent
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


@cache
def known_keys() -> tuple[str, ...]:
    """Keys of every setting that is a value."""
    return tuple(_walk(Config))


@cache
def sections() -> frozenset[str]:
    """Keys of the schema with further ones below them: ``data.columns``."""
    parts = (key.split(".") for key in known_keys() + free_keys())
    return frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))


@cache
def groups() -> tuple[str, ...]:
    """Sections that a file of ``configs`` can fill: ``algo=rloo``."""
    return tuple(sorted(path.name for path in config_dir().iterdir() if any(path.glob("*.yaml"))))


@cache
def free_keys() -> tuple[str, ...]:
    """Keys that hold a mapping whose names are not ours: kwargs and tools.specs."""
    return tuple(_walk(Config, mappings=True))


@cache
def item_classes() -> dict[str, type]:
    """Keys that hold a list of records -> the dataclass of one: env.mix."""
    return {key: get_args(kind)[0] for key, kind in _kinds(Config) if _is_list_of_records(kind)}


@cache
def record_classes() -> dict[str, type]:
    """Keys that hold a mapping to records -> the dataclass of one: placement.pools."""
    return {
        key: get_args(kind)[1]
        for key, kind in _kinds(Config)
        if get_origin(kind) is dict and dataclasses.is_dataclass(get_args(kind)[1])
    }


def _is_list_of_records(kind: Any) -> bool:
    return get_origin(kind) is list and dataclasses.is_dataclass(get_args(kind)[0])


def _walk(cls: type, *, mappings: bool = False) -> Iterator[str]:
    for key, kind in _kinds(cls):
        if (get_origin(kind) is dict) == mappings:
            yield key


def _kinds(cls: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, type) of every leaf."""
    hints = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        key, kind = f"{prefix}{item.name}", hints[item.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            yield from _kinds(kind, f"{key}.")
        else:
            yield key, kind


def group_file(group: str, choice: object) -> Path:
    """Return the file of a choice: ``algo=rloo``.

    Raises:
        ConfigError: there is none of that name.
    """
    known = sorted(path.stem for path in (config_dir() / group).glob("*.yaml"))
    if choice not in known:
        close = difflib.get_close_matches(str(choice), known, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ConfigError(f"{group}={choice}: {hint}known: {', '.join(known) or 'none'}")
    return config_dir() / group / f"{choice}.yaml"


def unknown_key_message(key: str, known: Sequence[str]) -> str:
    """Say that ``key`` is unknown, with the nearest known ones."""
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    if not close:  # the section may be right and the leaf wrong, or the other way round
        leaf = key.rsplit(".", 1)[-1]
        close = [name for name in known if name.rsplit(".", 1)[-1] == leaf][:3]
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    section = key.split(".")[0]
    inside = [name for name in known if name.startswith(f"{section}.")]
    return f"unknown setting {key!r}{hint}" + (
        "" if close or not inside else f"; {section} has: {', '.join(inside)}"
    )
