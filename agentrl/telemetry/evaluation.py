"""How good is the policy: mean@n and pass@k with intervals, per stratum.

The unit of chance is the task, not the sample: samples of one task are correlated, so intervals
come from the spread of per-task means. Failed trajectories (infrastructure, grader) are no
evidence about the policy: they are left out and counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from agentrl.types import Trajectory, TrajectoryGroup

ALL_TASKS = "all"

_TaskKey = tuple[str, str]
"""Ids of tasks are unique within an environment only."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Interval:
    """An estimate with its confidence limits."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Format as ``0.912 [0.894, 0.928]``."""
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(slots=True, kw_only=True)
class StratumResult:
    """Results of the tasks that share a tag."""

    stratum: str
    """``all``, or ``<tag>=<value>``."""
    num_tasks: int
    """Tasks with at least one scored sample."""
    num_samples: int
    """Scored samples."""
    num_failed: int
    """Samples without a score, left out."""
    success: Interval
    """mean@n: the mean over tasks of the task's success rate."""
    pass_at_k: dict[int, Interval]
    reward: Interval
    turns_mean: float
    response_tokens_mean: float


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of ``k`` samples drawn without replacement is correct.

    ``1 - C(n - c, k) / C(n, k)``, the unbiased estimator of Chen et al., "Evaluating Large
    Language Models Trained on Code" (2021), section 2.1.

    Raises:
        ValueError: not ``0 <= c <= n`` or not ``1 <= k <= n``.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@k: want 0 <= correct <= samples and 1 <= k <= samples, got "
            f"samples={num_samples}, correct={num_correct}, k={k}"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def proportion_interval(
    values: Sequence[float], *, samples_per_task: float = 1.0, confidence: float = 0.95
) -> Interval:
    """Wilson score interval for the mean of per-task values in [0, 1].

    With one sample per task the values are 0 or 1, and this is the usual Wilson interval
    (Wilson, 1927). With more, the number of trials is the effective one, ``p (1 - p) / se^2`` with
    ``se`` the standard error of the per-task means, kept between the number of tasks (samples of a
    task all alike) and the number of samples (independent). It never leaves [0, 1] and has a width
    also where every task succeeded.

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("an interval needs at least one task")
    num_tasks = len(values)
    mean = min(max(float(np.mean(values)), 0.0), 1.0)
    variance_of_mean = float(np.var(values)) / num_tasks
    trials = float(num_tasks)
    if variance_of_mean > 0:
        effective = mean * (1 - mean) / variance_of_mean
        trials = min(max(effective, num_tasks), num_tasks * max(samples_per_task, 1.0))
    z = _z(confidence)
    center = (mean + z * z / (2 * trials)) / (1 + z * z / trials)
    spread = math.sqrt(mean * (1 - mean) / trials + (z / (2 * trials)) ** 2)
    half = z * spread / (1 + z * z / trials)
    # Rounding must not push a limit past the mean or out of the range.
    low = min(max(center - half, 0.0), mean)
    high = max(min(center + half, 1.0), mean)
    return Interval(mean=mean, low=low, high=high)


def mean_interval(values: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Normal interval for the mean of per-task values; meant for 30 tasks and more.

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("an interval needs at least one task")
    mean = float(np.mean(values))
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    half = _z(confidence) * spread
    return Interval(mean=mean, low=mean - half, high=mean + half)


def paired_gain(
    before: Sequence[Trajectory], after: Sequence[Trajectory], *, confidence: float = 0.95
) -> Interval:
    """Interval for the change in success, paired by task: only common tasks count.

    Raises:
        ValueError: no task has a scored sample on both sides.
    """
    first, second = _success_by_task(before), _success_by_task(after)
    common = sorted(first.keys() & second.keys())
    return mean_interval(
        [float(np.mean(second[task])) - float(np.mean(first[task])) for task in common],
        confidence=confidence,
    )


def evaluate_strata(
    trajectories: Sequence[Trajectory], *, confidence: float = 0.95
) -> list[StratumResult]:
    """Evaluate all tasks, then every ``<tag>=<value>`` of the tasks' tags, in order.

    Strata without a scored sample are left out. pass@k is given for those powers of two that at
    least half of the tasks have scored samples for; tasks with fewer are left out of that k.
    """
    members: dict[str, list[Trajectory]] = {ALL_TASKS: list(trajectories)}
    tagged: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        for tag, value in trajectory.task.tags.items():
            tagged.setdefault(f"{tag}={value}", []).append(trajectory)
    members |= {stratum: tagged[stratum] for stratum in sorted(tagged, key=_natural)}
    return [
        _evaluate(stratum, items, confidence)
        for stratum, items in members.items()
        if any(item.score is not None for item in items)
    ]


def evaluation_metrics(
    groups: Sequence[TrajectoryGroup], *, prefix: str, confidence: float = 0.95
) -> dict[str, float]:
    """Flat metrics of one environment.

    Args:
        groups: one per task.
        prefix: ``<split>/<env>``, for example ``val/code_sandbox``.
        confidence: of the interval.

    Returns:
        Under ``prefix``: ``success``, ``success_low``, ``success_high``, ``reward``, ``turns``,
        ``response_tokens``, ``tasks``, ``failed``, ``pass@<k>`` and, per stratum,
        ``success/<tag>=<value>``. Only ``failed`` where no sample has a score.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    metrics: dict[str, float] = {
        f"{prefix}/failed": sum(trajectory.score is None for trajectory in trajectories)
    }
    for result in evaluate_strata(trajectories, confidence=confidence):
        if result.stratum != ALL_TASKS:
            metrics[f"{prefix}/success/{result.stratum}"] = result.success.mean
            continue
        metrics |= {
            f"{prefix}/success": result.success.mean,
            f"{prefix}/success_low": result.success.low,
            f"{prefix}/success_high": result.success.high,
            f"{prefix}/reward": result.reward.mean,
            f"{prefix}/turns": result.turns_mean,
            f"{prefix}/response_tokens": result.response_tokens_mean,
            f"{prefix}/tasks": result.num_tasks,
        }
        metrics |= {f"{prefix}/pass@{k}": v.mean for k, v in result.pass_at_k.items() if k > 1}
    return metrics


def _evaluate(stratum: str, trajectories: Sequence[Trajectory], confidence: float) -> StratumResult:
    scored = [trajectory for trajectory in trajectories if trajectory.score is not None]
    successes = _success_by_task(scored)
    rewards: dict[_TaskKey, list[float]] = {}
    for trajectory in scored:
        rewards.setdefault(_task_key(trajectory), []).append(trajectory.total_reward)
    per_task = len(scored) / len(successes)
    counts = sorted(len(values) for values in successes.values())
    most = counts[len(counts) // 2]
    return StratumResult(
        stratum=stratum,
        num_tasks=len(successes),
        num_samples=len(scored),
        num_failed=len(trajectories) - len(scored),
        success=proportion_interval(
            [float(np.mean(values)) for values in successes.values()],
            samples_per_task=per_task,
            confidence=confidence,
        ),
        pass_at_k={
            k: proportion_interval(
                [
                    pass_at_k(len(values), sum(values), k)
                    for values in successes.values()
                    if len(values) >= k
                ],
                samples_per_task=per_task,
                confidence=confidence,
            )
            for k in (2**power for power in range(most.bit_length()))
        },
        reward=mean_interval([float(np.mean(v)) for v in rewards.values()], confidence=confidence),
        turns_mean=float(np.mean([len(item.turns) for item in scored])),
        response_tokens_mean=float(np.mean([item.num_sampled_tokens for item in scored])),
    )


def _success_by_task(trajectories: Sequence[Trajectory]) -> dict[_TaskKey, list[bool]]:
    successes: dict[_TaskKey, list[bool]] = {}
    for trajectory in trajectories:
        if trajectory.score is not None:
            successes.setdefault(_task_key(trajectory), []).append(trajectory.score.success)
    return successes


def _task_key(trajectory: Trajectory) -> _TaskKey:
    return trajectory.env_id, trajectory.task.id


def _natural(text: str) -> list[tuple[int, str]]:
    """Sort key that puts ``width=5`` before ``width=10``."""
    parts = re.split(r"(\d+)", text)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)
