"""Metrics of each environment of a run: what a mean over all of them would hide. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.telemetry.tracker import is_finite
from agentrl.types import TrajectoryGroup

_SHARE = "group/{}/share"


@dataclass(slots=True, kw_only=True)
class EnvironmentRow:
    """One environment over a run. Pairs are (first steps, last steps); None without data."""

    env_id: str
    share: float | None
    """Of the groups of a step, mean over steps."""
    success: tuple[float, float] | None
    reward: tuple[float, float] | None
    zero_advantage: tuple[float, float] | None
    failed: float
    """Trajectories over the whole run."""


def environment_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Summarise the groups of a step by environment.

    Returns:
        For every environment that occurs: ``reward/<env>/mean`` and ``success/<env>/mean`` over
        scored trajectories, ``group/<env>/share`` of the step's groups,
        ``group/<env>/zero_advantage_fraction`` of its groups with a scored member, and
        ``trajectories/<env>/failed``. Means of nothing have no key.
    """
    metrics: dict[str, float] = {}
    for env in sorted({group.env_id for group in groups}):
        own = [group for group in groups if group.env_id == env]
        attempts = [item for group in own for item in (*group.trajectories, *group.discarded)]
        rewards = [item.total_reward for item in attempts if item.score is not None]
        successes = [item.score.success for item in attempts if item.score is not None]
        flat = [one for group in own if (one := is_flat(group)) is not None]
        metrics[_SHARE.format(env)] = len(own) / len(groups)
        metrics[f"trajectories/{env}/failed"] = len(attempts) - len(rewards)
        if rewards:
            metrics[f"reward/{env}/mean"] = float(np.mean(rewards))
            metrics[f"success/{env}/mean"] = float(np.mean(successes))
        if flat:
            metrics[f"group/{env}/zero_advantage_fraction"] = float(np.mean(flat))
    return metrics


def environments_in(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Find the environments of a run in its metric lines."""
    before, after = _SHARE.split("{}")
    return sorted(
        {
            key.removeprefix(before).removesuffix(after)
            for line in lines
            for key in line
            if key.startswith(before) and key.endswith(after)
        }
    )


def environment_rows(lines: Sequence[Mapping[str, Any]], *, edge: int) -> list[EnvironmentRow]:
    """Summarise a run by environment; nothing where there is one only.

    Args:
        edge: steps that "first" and "last" are means over.
    """
    names = environments_in(lines)
    keys = {_SHARE.format(env) for env in names}
    num_steps = sum(not keys.isdisjoint(line) for line in lines)

    def values(key: str) -> list[float]:
        return [float(line[key]) for line in lines if is_finite(line.get(key))]

    def change(key: str) -> tuple[float, float] | None:
        found = values(key)
        if not found:
            return None
        return float(np.mean(found[:edge])), float(np.mean(found[-edge:]))

    def share_of(env: str) -> float | None:
        found = values(_SHARE.format(env))
        return sum(found) / num_steps if found else None

    return [
        EnvironmentRow(
            env_id=env,
            share=share_of(env),
            success=change(f"success/{env}/mean"),
            reward=change(f"reward/{env}/mean"),
            zero_advantage=change(f"group/{env}/zero_advantage_fraction"),
            failed=sum(values(f"trajectories/{env}/failed")),
        )
        for env in (names if len(names) > 1 else ())
    ]


def is_flat(group: TrajectoryGroup) -> bool | None:
    """Whether all scored members earned the same; None where none is scored."""
    rewards = {item.total_reward for item in group.trajectories if item.score is not None}
    return len(rewards) == 1 if rewards else None
