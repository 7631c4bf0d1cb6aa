"""When a run that goes on would teach nothing: what stops it, in a message that says why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.dist.engine import TrainEngine
from agentrl.errors import TrainingError
from agentrl.rollout.config import FailureConfig
from agentrl.train.progress import Progress

Metrics = dict[str, Any]


def count_empty_step(progress: Progress, failure: FailureConfig, why: str) -> Metrics:
    """Count a step without anything to learn from.

    Raises:
        TrainingError: too many in a row.
    """
    progress.empty_steps += 1
    if progress.empty_steps >= failure.max_empty_steps:
        raise TrainingError(
            f"{progress.empty_steps} steps in a row had no group to learn from: {why}. "
            "Every sample of each prompt earned the same, failed, or was rejected; look at "
            "report.html, make tasks easier, raise rollout.n, or start from a better model"
        )
    return {"group/empty_steps": progress.empty_steps}


def count_updates(progress: Progress, failure: FailureConfig, metrics: Mapping[str, Any]) -> None:
    """Count the updates of a step that had something to learn from.

    A step counts as skipped where policy or critic made none of its updates: one that learns
    does not make up for the other.

    Raises:
        TrainingError: the gradient was not finite too often in a row.
    """
    progress.empty_steps = 0
    skipped = {
        role: int(metrics.get(f"{role}/skipped_updates", 0))
        for role in ("actor", "critic")
        if metrics.get(f"{role}/updates", 0) == metrics.get(f"{role}/skipped_updates", 0)
    }
    stuck = sum(skipped.values())
    progress.skipped_updates = progress.skipped_updates + stuck if stuck else 0
    if progress.skipped_updates >= failure.max_skipped_updates:
        role = max(skipped, key=lambda name: skipped[name])
        raise TrainingError(
            f"{progress.skipped_updates} updates in a row had a gradient that is not "
            f"finite (last step: {progress.step + 1}); look at {role}/loss, credit/* and "
            "mismatch/* in metrics.jsonl (a loss of your own?), and lower "
            f"{role}.lr or {role}.grad_clip"
        )


def refuse_mismatch(progress: Progress, failure: FailureConfig, metrics: Mapping[str, Any]) -> None:
    """Stop where the trained policy is not the sampled one: ratios would mean nothing.

    Raises:
        TrainingError: ``mismatch/k3_kl`` is above ``failure.max_mismatch_kl``.
    """
    found, limit = metrics.get("mismatch/k3_kl", 0.0), failure.max_mismatch_kl
    if found > limit:
        raise TrainingError(
            f"before the update of step {progress.step + 1} the trainer's policy was {found:.3g} "
            "nats per token from the one that the engine sampled with (largest difference of "
            f"a log-probability: {metrics.get('mismatch/logprob_abs_max', 0.0):.3g}), more "
            f"than failure.max_mismatch_kl={limit:g}: weights, temperature or precision "
            "differ; lower rollout.max_staleness, or raise the limit where that is meant"
        )


def refuse_untrained(actor: TrainEngine) -> None:
    """A run in which every single update was skipped is no success, however short.

    Raises:
        TrainingError: nothing was trained.
    """
    if actor.num_skipped and not actor.num_updates:
        raise TrainingError(
            f"nothing was trained: all {actor.num_skipped} updates of the run had a "
            "gradient that is not finite; look at actor/loss, credit/* and mismatch/* in "
            "metrics.jsonl: at a loss of your own, at weights and coefficients, at actor.lr"
        )
