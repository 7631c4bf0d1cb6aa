"""From command-line overrides to one typed, checked :class:`~agentrl.config.schema.Config`."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import agentrl
from agentrl.config.schema import Config
from agentrl.config.validate import validate
from agentrl.config.yaml_values import read_value
from agentrl.errors import ConfigError
from agentrl.kwargs import check_kwargs
from agentrl.rollout.fit_limits import LENGTHS, fitted
from agentrl.train.config import TINY


def load(overrides: Sequence[str], *, base: Config | None = None) -> Config:
    """Compose and check a configuration.

    Args:
        overrides: ``key=value`` pairs; groups (``algo=grpo``) choose a file of ``configs``.
        base: start from this configuration (of a run) instead of the defaults.

    Raises:
        ConfigError: an unknown key, a wrong type, or settings that contradict each other.
    """
    config = composed(overrides, base=base)
    validate(config)
    return config


def composed(overrides: Sequence[str], *, base: Config | None = None) -> Config:
    """Compose a configuration whose settings have not been checked against each other.

    Args:
        overrides, base: as of :func:`load`.

    Raises:
        ConfigError: an unknown key, or a wrong type.
    """
    try:
        config = _composed(overrides, base)
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 500 brackets
        raise ConfigError(f"cannot read the settings: {_first_line(error)}") from error
    if base is None:
        keys = given_keys(overrides)
        given = [name for name in LENGTHS if f"rollout.{name}" in keys]
        config.rollout = fitted(config.rollout, given=given)
    return config


def given_keys(overrides: Sequence[str]) -> frozenset[str]:
    """Return the dotted keys that settings name: what a user set, and no preset.

    Raises:
        ConfigError: one of them cannot be read.
    """
    return frozenset(item.key_or_group.lstrip("+") for item in _parse(_itemised(overrides)))


def _composed(overrides: Sequence[str], base: Config | None) -> Config:
    parsed = [_checked(override) for override in _parse(_itemised(overrides))]
    parsed += _parse(_other_length(parsed))
    if base is None and _names_pretrained(parsed):
        parsed = [*_parse(["model=pretrained"]), *parsed]
    records = [item for item in parsed if _record_mapping(item) is not None]
    parsed = [item for item in parsed if item not in records]
    config = _merge(base, parsed) if base is not None else _compose(parsed)
    return _with_records(config, records)


def _compose(parsed: Sequence[Override]) -> Config:
    ConfigStore.instance().store(name="agentrl_schema", node=Config)
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            composed = compose("train", overrides=[_open_kwargs(item) for item in parsed])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error
    return _to_object(composed)


def _with_records(config: Config, overrides: Sequence[Override]) -> Config:
    """Apply ``placement.pools.NAME.ranks=2``, which adds the record of that name where needed.

    Hydra would add a plain mapping in its place.
    """
    tree: Any = OmegaConf.structured(config)
    for override in overrides:
        key = override.key_or_group.lstrip("+")
        mapping = _record_mapping(override)
        assert mapping is not None
        name, _, leaf = key.removeprefix(f"{mapping}.").partition(".")
        known = [item.name for item in dataclasses.fields(_record_classes()[mapping])]
        value = override.value()
        given = {leaf: value} if leaf else value
        if not isinstance(given, dict):
            raise ConfigError(
                f"{_shortened(override.input_line or key)}: write {mapping}.{name}.{known[0]}=..."
            )
        for field in given:
            if field not in known:
                paths = [f"{mapping}.{name}.{item}" for item in known]
                raise ConfigError(unknown_key_message(f"{mapping}.{name}.{field}", paths))
        for part in reversed((*mapping.split("."), name)):
            given = {part: given}
        try:
            tree = OmegaConf.merge(tree, OmegaConf.create(given))
        except OmegaConfBaseException as error:
            raise ConfigError(_explain(error)) from error
    return _to_object(tree) if overrides else config


def _record_mapping(override: Override) -> str | None:
    """Return the key of the mapping of records that a setting lies in: ``placement.pools``."""
    key = override.key_or_group.lstrip("+")
    return next((name for name in _record_classes() if key.startswith(f"{name}.")), None)


def config_dir() -> Path:
    """Return the folder of YAML choices: packaged in a wheel, beside the package in a checkout."""
    package = Path(agentrl.__file__).parent
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def to_dict(config: Config) -> dict[str, Any]:
    """Return ``config`` as plain data, ready for YAML or JSON."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return plain  # pyright: ignore[reportReturnType]


def from_dict(data: Mapping[str, Any], *, source: str) -> Config:
    """Undo :func:`to_dict`.

    Raises:
        ConfigError: the data has other keys or types than this version knows.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(dict(data)))
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: {_explain(error)}") from error
    return _to_object(merged)


def from_yaml(path: Path) -> Config:
    """Read the resolved configuration of a run.

    Raises:
        ConfigError: no such file, or it is none of this version's.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{str(path)!r} holds {type(data).__name__}, not a mapping of settings")
    return from_dict(data, source=str(path))


def _other_length(overrides: Sequence[Override]) -> list[str]:
    """Switch off the length of the run that was not named: presets and runs have the other one."""
    values = {item.key_or_group: item.value() for item in overrides}
    steps, epochs = "trainer.total_steps", "trainer.epochs"
    if values.get(epochs) is not None and steps not in values:
        return [f"{steps}=0"]
    if steps in values and epochs not in values:
        return [f"{epochs}=null"]
    return []


def _names_pretrained(overrides: Sequence[Override]) -> bool:
    """Whether a model is named by its path alone: the recipe of the embedded one is not for it."""
    values = {item.key_or_group: item.value() for item in overrides}
    return "model" not in values and values.get("model.path", TINY) != TINY


def _itemised(overrides: Sequence[str]) -> Iterator[str]:
    """Turn ``env.kwargs={a: 1}`` into ``env.kwargs.a=1``, sections too: one form for the rest."""
    for item in overrides:
        key, _, text = item.partition("=")
        is_section = key in _sections() and text.lstrip().startswith("{")
        is_free = key.lstrip("+") in _free_keys()
        value = _yaml_value(item, text) if is_section or is_free else None
        if isinstance(value, dict):
            for name, inner in value.items():
                if re.fullmatch(r"[\w-]+", name):
                    yield from _itemised([f"{key}.{name}={_in_grammar(inner)}"])
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
        raise ConfigError(f"cannot read the setting {_shortened(item)}: {reason}") from error
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
                f"cannot read the setting {_shortened(item)}: {name!r} is no name; "
                "write {name: value}, with a blank after the colon"
            )
        _refuse_odd_names(inner, item)


def _parse(overrides: Iterable[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed: list[Override] = []
    for item in overrides:
        if "=" not in item and not item.startswith("~"):
            raise ConfigError(
                f"{item!r} is no setting: write key=value, for example trainer.seed=1"
            )
        try:
            parsed.append(parser.parse_override(item))
        except (HydraException, ValueError, RecursionError) as error:
            raise ConfigError(
                f"cannot read the setting {_shortened(item)}: quote values with special "
                f"characters, key='value' ({_first_line(error)})"
            ) from error
    return parsed


def _shortened(item: str) -> str:
    return repr(item if len(item) <= 120 else f"{item[:117]}...")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _checked(override: Override) -> Override:
    """Refuse keys that exist nowhere, before Hydra's less helpful message."""
    key = override.key_or_group.split("@")[0]
    if override.is_sweep_override():
        raise ConfigError(f"{override.input_line!r}: several values at once are not supported")
    if override.is_delete():
        raise ConfigError(f"{override.input_line!r}: settings cannot be deleted, only changed")
    if key in _groups():
        _group_file(key, override.value())
        return override
    if key in _item_classes():
        _check_items(key, override)
    free = _free_keys()
    if key in _known_keys() or key in free or any(key.startswith(f"{name}.") for name in free):
        return override
    section, _, leaf = key.rpartition(".")
    homes = [
        name for name in free if name.endswith("kwargs") and name.rpartition(".")[0] == section
    ]
    argument = f"; arguments stand under {' or '.join(f'{n}.{leaf}' for n in homes)}"
    message = unknown_key_message(key, _known_keys() + free)
    raise ConfigError(message + (argument if homes else ""))


def _check_items(key: str, override: Override) -> None:
    """Refuse odd entries of a list of records, with their place, before the library's message."""
    value, record = override.value(), _item_classes()[key]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        names = [item.name for item in dataclasses.fields(record)]
        raise ConfigError(
            f"{_shortened(override.input_line or key)}: must be a list of entries, "
            f"{key}=[{{{names[0]}: ...}}, ...]; an entry takes {', '.join(names)}"
        )
    for index, item in enumerate(value):
        check_kwargs(record, item, key=f"{key}[{index}]")


def _group_file(group: str, choice: object) -> Path:
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


def _open_kwargs(override: Override) -> str:
    """Let ``x.kwargs.name=value`` add a key: its target's signature checks it."""
    line = override.input_line or ""
    if any(f"{override.key_or_group}.".startswith(f"{name}.") for name in _free_keys()):
        return "++" + line.lstrip("+")
    return line.lstrip("+")


def _merge(base: Config, overrides: Sequence[Override]) -> Config:
    tree: Any = OmegaConf.structured(base)
    for override in overrides:
        key = override.key_or_group
        if key in _groups():
            file = _group_file(key, override.value())
            choice = OmegaConf.load(file)
            if file.read_text().startswith("# @package _global_"):
                tree = OmegaConf.merge(tree, choice)
            else:
                tree[key] = OmegaConf.merge(tree[key], choice)
            continue
        try:
            OmegaConf.update(
                tree,
                key,
                override.value(),
                force_add=any(key.startswith(f"{n}.") for n in _free_keys()),
            )
        except OmegaConfBaseException as error:
            raise ConfigError(_explain(error)) from error
    return _to_object(tree)


def _to_object(tree: Any) -> Config:
    try:
        if isinstance(tree, DictConfig) and "hydra" in tree:
            del tree["hydra"]
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), tree))
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error)) from error
    assert isinstance(config, Config)
    return config


def _explain(error: Exception) -> str:
    """One line out of a chain of library errors: the first of OmegaConf's names key and value.

    (What lies below it depends on whether a debugger or a coverage tool is watching, and the chain
    may lead back to itself.)
    """
    cause: BaseException = error
    seen: set[int] = set()
    while not isinstance(cause, OmegaConfBaseException) and id(cause) not in seen:
        seen.add(id(cause))
        cause = cause.__cause__ or cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    key = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("full_key:")), ""
    )
    text = lines[0] if lines else type(cause).__name__
    return f"{key}: {text}" if key and key not in text else text


@cache
def _known_keys() -> tuple[str, ...]:
    return tuple(_walk(Config))


@cache
def _sections() -> frozenset[str]:
    """Keys of the schema with further ones below them: ``data.columns``."""
    parts = (key.split(".") for key in _known_keys() + _free_keys())
    return frozenset(".".join(names[:end]) for names in parts for end in range(1, len(names)))


@cache
def _groups() -> tuple[str, ...]:
    """Sections that a file of ``configs`` can fill: ``algo=rloo``."""
    return tuple(sorted(path.name for path in config_dir().iterdir() if any(path.glob("*.yaml"))))


@cache
def _free_keys() -> tuple[str, ...]:
    """Keys that hold a mapping whose names are not ours: kwargs and tools.specs."""
    return tuple(_walk(Config, mappings=True))


@cache
def _item_classes() -> dict[str, type]:
    """Keys that hold a list of records -> the dataclass of one: env.mix."""
    return {key: get_args(kind)[0] for key, kind in _kinds(Config) if _is_list_of_records(kind)}


@cache
def _record_classes() -> dict[str, type]:
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
