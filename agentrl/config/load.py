"""From command-line overrides to one typed, checked :class:`~agentrl.config.schema.Config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl.config.keys import (
    config_dir,
    free_keys,
    group_file,
    groups,
    record_classes,
    unknown_key_message,
)
from agentrl.config.overrides import (
    checked,
    first_line,
    itemised,
    names_pretrained,
    other_length,
    parse,
    record_mapping,
    shortened,
)
from agentrl.config.schema import Config
from agentrl.config.validate import validate
from agentrl.errors import ConfigError
from agentrl.rollout.fit_limits import LENGTHS, fitted

if not OmegaConf.has_resolver("env"):
    # ${env:NAME} stays what it is: whoever needs the secret looks it up, and no file has it.
    OmegaConf.register_new_resolver("env", lambda name: f"${{env:{name}}}")


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
    except OmegaConfBaseException as error:  # a text that is half an interpolation
        raise ConfigError(_explain(error)) from error
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 500 brackets
        raise ConfigError(f"cannot read the settings: {first_line(error)}") from error
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
    return frozenset(item.key_or_group.lstrip("+") for item in parse(itemised(overrides)))


def _composed(overrides: Sequence[str], base: Config | None) -> Config:
    parsed = [checked(override) for override in parse(itemised(overrides))]
    parsed += parse(other_length(parsed))
    if base is None and names_pretrained(parsed):
        parsed = [*parse(["model=pretrained"]), *parsed]
    records = [item for item in parsed if record_mapping(item) is not None]
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
        mapping = record_mapping(override)
        assert mapping is not None
        name, _, leaf = key.removeprefix(f"{mapping}.").partition(".")
        known = [item.name for item in dataclasses.fields(record_classes()[mapping])]
        value = override.value()
        given = {leaf: value} if leaf else value
        if not isinstance(given, dict):
            raise ConfigError(
                f"{shortened(override.input_line or key)}: write {mapping}.{name}.{known[0]}=..."
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


def _open_kwargs(override: Override) -> str:
    """Let ``x.kwargs.name=value`` add a key: its target's signature checks it."""
    line = override.input_line or ""
    if any(f"{override.key_or_group}.".startswith(f"{name}.") for name in free_keys()):
        return "++" + line.lstrip("+")
    return line.lstrip("+")


def _merge(base: Config, overrides: Sequence[Override]) -> Config:
    tree: Any = OmegaConf.structured(base)
    for override in overrides:
        key = override.key_or_group
        if key in groups():
            file = group_file(key, override.value())
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
                force_add=any(key.startswith(f"{n}.") for n in free_keys()),
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
