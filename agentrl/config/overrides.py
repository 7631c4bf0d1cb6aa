"""From the text of overrides to parsed ones, all in one form and with keys that exist."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from agentrl.config.keys import (
    free_keys,
    group_file,
    groups,
    item_classes,
    known_keys,
    record_classes,
    sections,
    unknown_key_message,
)
from agentrl.config.yaml_values import read_value
from agentrl.errors import ConfigError
from agentrl.kwargs import check_kwargs
from agentrl.train.config import TINY

_QUOTED_OR_LINE_END = re.compile(
    r"""(?P<quoted>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|\s*\n\s*""", re.DOTALL
)


def parse(overrides: Iterable[str]) -> list[Override]:
    """Read ``key=value`` in the grammar of Hydra.

    Raises:
        ConfigError: one of them cannot be read.
    """
    parser = OverridesParser.create()
    parsed: list[Override] = []
    for item in overrides:
        if "=" not in item and not item.startswith("~"):
            raise ConfigError(
                f"{item!r} is no setting: write key=value, for example trainer.seed=1"
            )
        try:
            parsed.append(parser.parse_override(_on_one_line(item)))
        except (HydraException, ValueError, RecursionError) as error:
            raise ConfigError(
                f"cannot read the setting {shortened(item)}: quote values with special "
                f"characters, key='value' ({first_line(error)})"
            ) from error
    return parsed


def _on_one_line(item: str) -> str:
    """Join the lines of a list or a mapping, which the grammar wants on one."""
    key, _, value = item.partition("=")
    if not value.lstrip().startswith(("[", "{")):
        return item
    joined = _QUOTED_OR_LINE_END.sub(lambda found: found["quoted"] or " ", value)
    return f"{key}={joined.strip()}"


def itemised(overrides: Sequence[str]) -> Iterator[str]:
    """Turn ``env.kwargs={a: 1}`` into ``env.kwargs.a=1``, sections too: one form for the rest."""
    for item in overrides:
        key, _, text = item.partition("=")
        is_section = key in sections() and text.lstrip().startswith("{")
        is_free = key.lstrip("+") in free_keys()
        value = _yaml_value(item, text) if is_section or is_free else None
        if isinstance(value, dict):
            for name, inner in value.items():
                if re.fullmatch(r"[\w-]+", name):
                    yield from itemised([f"{key}.{name}={_in_grammar(inner)}"])
                else:  # the part of a key that the grammar has no way to write
                    yield f"{key}={{{name}: {_in_grammar(inner)}}}"
        else:
            yield item


def _in_grammar(value: object) -> str:
    """Write a value as the grammar of overrides reads it: names of mappings stand unquoted."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_in_grammar(v)}" for name, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_in_grammar, value)) + "]"
    return json.dumps(value)


def _yaml_value(item: str, text: str) -> object:
    try:
        value = read_value(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot read the setting {shortened(item)}: {reason}") from error
    _refuse_odd_names(value, item)
    return value


def _refuse_odd_names(value: object, item: str) -> None:
    """Refuse ``{a:1}`` (one name without a value) and ``{1: 2}`` (a name that is a number)."""
    if isinstance(value, list):
        for inner in value:
            _refuse_odd_names(inner, item)
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        if not isinstance(name, str) or (inner is None and ":" in name):
            raise ConfigError(
                f"cannot read the setting {shortened(item)}: {name!r} is no name; "
                "write {name: value}, with a blank after the colon"
            )
        _refuse_odd_names(inner, item)


def shortened(item: str) -> str:
    """Quote what a user wrote, so that a message stays one line."""
    return repr(item if len(item) <= 120 else f"{item[:117]}...")


def first_line(error: BaseException) -> str:
    """Return what a library says first."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def checked(override: Override) -> Override:
    """Refuse keys that exist nowhere, before Hydra's less helpful message."""
    key = override.key_or_group.split("@")[0]
    if override.is_sweep_override():
        raise ConfigError(f"{override.input_line!r}: several values at once are not supported")
    if override.is_delete():
        raise ConfigError(f"{override.input_line!r}: settings cannot be deleted, only changed")
    if key in groups():
        group_file(key, override.value())
        return override
    if key in item_classes():
        _check_items(key, override)
    free = free_keys()
    if key in known_keys() or key in free or any(key.startswith(f"{name}.") for name in free):
        return override
    section, _, leaf = key.rpartition(".")
    homes = [
        name for name in free if name.endswith("kwargs") and name.rpartition(".")[0] == section
    ]
    argument = f"; arguments stand under {' or '.join(f'{n}.{leaf}' for n in homes)}"
    message = unknown_key_message(key, known_keys() + free)
    raise ConfigError(message + (argument if homes else ""))


def _check_items(key: str, override: Override) -> None:
    """Refuse odd entries of a list of records, with their place, before the library's message."""
    value, record = override.value(), item_classes()[key]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        names = [item.name for item in dataclasses.fields(record)]
        raise ConfigError(
            f"{shortened(override.input_line or key)}: must be a list of entries, "
            f"{key}=[{{{names[0]}: ...}}, ...]; an entry takes {', '.join(names)}"
        )
    for index, item in enumerate(value):
        check_kwargs(record, item, key=f"{key}[{index}]")


def record_mapping(override: Override) -> str | None:
    """Return the key of the mapping of records that a setting lies in: ``placement.pools``."""
    key = override.key_or_group.lstrip("+")
    return next((name for name in record_classes() if key.startswith(f"{name}.")), None)


def other_length(overrides: Sequence[Override]) -> list[str]:
    """Switch off the length of the run that was not named: presets and runs have the other one."""
    values = {item.key_or_group: item.value() for item in overrides}
    steps, epochs = "trainer.total_steps", "trainer.epochs"
    if values.get(epochs) is not None and steps not in values:
        return [f"{steps}=0"]
    if steps in values and epochs not in values:
        return [f"{epochs}=null"]
    return []


def names_pretrained(overrides: Sequence[Override]) -> bool:
    """Whether a model is named by its path alone: the recipe of the embedded one is not for it."""
    values = {item.key_or_group: item.value() for item in overrides}
    return "model" not in values and values.get("model.path", TINY) != TINY
