"""The environments of a run as a list; a run with one environment is a mix of one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.env.config import EnvConfig, MixEntry


@dataclass(slots=True, frozen=True, kw_only=True)
class EnvEntry:
    """One environment of a run, resolved."""

    name: str
    """What metrics, evaluations and trajectories call it."""
    config: EnvConfig
    """Its id and arguments, and how it is hosted; holds no mix."""
    weight: float = 1.0
    namespace: str = ""
    """Part of every seed and group id. Empty where there is only one environment; in a mix its
    name, since ids of tasks are unique within an environment only."""
    algo: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the algorithm that are others for this environment."""
    key: str = "env"
    """Where its settings stand, for messages."""


def environments(config: EnvConfig) -> list[EnvEntry]:
    """Return the environments of a run, in the order of ``env.mix``.

    Expects settings that :func:`mix_problems` finds nothing wrong with.
    """
    if not config.mix:
        return [EnvEntry(name=config.id, config=config)]
    alone = len(config.mix) == 1
    return [
        EnvEntry(
            name=_name(entry),
            config=replace(config, id=entry.id, kwargs=entry.kwargs, mix=[]),
            weight=entry.weight,
            namespace="" if alone else _name(entry),
            algo=entry.algo,
            key=f"env.mix[{index}]",
        )
        for index, entry in enumerate(config.mix)
    ]


def run_label(config: EnvConfig) -> str:
    """Name all environments in one word: ``guess_number+calculator``."""
    return "+".join(entry.name for entry in environments(config))


def mix_problems(config: EnvConfig) -> Iterator[str]:
    """Say what is wrong with the choice of environments, each with the fix."""
    if not config.mix:
        if not config.id:
            yield (
                "env.id is not set: choose an environment with --env NAME (`agentrl envs list`), "
                "or several with env.mix=[{id: NAME}, {id: OTHER}]"
            )
        return
    if config.id:
        yield (
            f"env.id={config.id!r} (--env) and env.mix together: which one is meant? Put it into "
            "the mix as an entry, or leave one of them out (env.mix=[], or env.id='')"
        )
    if config.kwargs:
        yield (
            f"env.kwargs={config.kwargs} with env.mix: arguments belong to one environment; write "
            "them into its entry, {id: NAME, kwargs: {...}}"
        )
    for index, entry in enumerate(config.mix):
        key = f"env.mix[{index}]"
        if not entry.id.strip():
            yield f"{key}.id is not set: name an environment (`agentrl envs list`)"
        if entry.name is not None and (not entry.name.strip() or not entry.name.isprintable()):
            yield f"{key}.name={entry.name!r}: must be a text to read, or be left out"
        if not (entry.weight > 0 and math.isfinite(entry.weight)):
            yield (
                f"{key}.weight={entry.weight}: must be a finite number above 0; leave an entry out "
                "that is not to be sampled"
            )
    repeated = [name for name, count in Counter(map(_name, config.mix)).items() if count > 1]
    for name in filter(None, repeated):
        yield (
            f"env.mix holds {name!r} more than once: their metrics and seeds could not be told "
            "apart; give each a name of its own, {id: ..., name: ...}"
        )


def _name(entry: MixEntry) -> str:
    return entry.id if entry.name is None else entry.name
