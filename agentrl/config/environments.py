"""How each environment of a run turns rewards into advantages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl.algo.config import CreditConfig
from agentrl.config.credit import credit_problems
from agentrl.env.entries import EnvEntry, environments
from agentrl.errors import ConfigError
from agentrl.kwargs import check_kwargs

if TYPE_CHECKING:
    from agentrl.config.schema import Config

CREDIT_KEYS = tuple(item.name for item in dataclasses.fields(CreditConfig))
"""What an entry of ``env.mix`` may set under ``algo``; a loss is of the whole batch."""


def credit_configs(config: Config) -> dict[str, CreditConfig]:
    """Return, by the name of the environment, ``algo`` with what its entry changes.

    ``reward_weights`` and ``advantage_kwargs`` are merged name by name; another estimator starts
    without arguments, since those of ``algo`` are for the one named there.

    Raises:
        ConfigError: an entry sets what does not exist, or with a wrong type.
    """
    return {entry.name: _credit(config.algo, entry) for entry in environments(config.env)}


def mixed_credit_problems(config: Config) -> Iterator[str]:
    """Say what is wrong with the estimators that entries choose, one line each."""
    for entry in environments(config.env):
        if not entry.algo:
            continue
        try:
            credit = _credit(config.algo, entry)
        except ConfigError as error:
            yield str(error)
        else:
            yield from credit_problems(credit, config, key=f"{entry.key}.algo")


def _credit(base: CreditConfig, entry: EnvEntry) -> CreditConfig:
    own = {name: getattr(base, name) for name in CREDIT_KEYS}
    key = f"{entry.key}.algo"
    check_kwargs(CreditConfig, entry.algo, key=key)
    if entry.algo.get("advantage", base.advantage) != base.advantage:
        own["advantage_kwargs"] = {}
    tree: Any = OmegaConf.structured(CreditConfig(**own))
    try:
        found = OmegaConf.to_object(OmegaConf.merge(tree, {**entry.algo}))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error
    assert isinstance(found, CreditConfig)
    return found
