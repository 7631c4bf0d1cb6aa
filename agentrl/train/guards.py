"""When a run that goes on would teach nothing: what stops it, in a message that says why."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from agentrl.dist.engine import TrainEngine
from agentrl.errors import TrainingError
from agentrl.rollout.config import FailureConfig
from agentrl.train.mismatch import judged
from agentrl.train.progress import Progress

Metrics = dict[str, Any]

logger = logging.getLogger(__name__)


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
            "report.html, make tasks easier, raise rollout.n, start from a better model, or allow "
            f"more than failure.max_empty_steps={failure.max_empty_steps}"
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


def refuse_mismatch(
    progress: Progress, failure: FailureConfig, metrics: Mapping[str, Any], *, is_first: bool
) -> None:
    """Stop where the trained policy is not the sampled one: ratios would mean nothing.

    Args:
        is_first: nothing was updated in this process yet.

    Raises:
        TrainingError: of the tokens of the present version the KL is above
            ``failure.max_mismatch_kl``; or, at the first step, the multiplier above
            ``failure.max_start_mismatch``.
    """
    if (whole := metrics.get("mismatch/k3_kl")) is None:
        return
    limit = failure.max_mismatch_kl
    found = judged(metrics, "k3_kl") if math.isfinite(whole) else whole
    if found is not None and not found <= limit:  # what is no number is no match either
        raise TrainingError(
            f"before the update of step {progress.step + 1} the trainer's policy was {found:.3g} "
            f"nats per token from the one that the engine sampled with {_largest(metrics)}, more "
            f"than failure.max_mismatch_kl={limit:g}: weights, temperature or precision "
            "differ; look at the tokens with `agentrl mismatch RUN`, or raise the limit where that "
            "is meant"
        )
    start, limit = judged(metrics, "exp_abs_mean"), failure.max_start_mismatch
    if is_first and start is not None and not start <= limit:
        raise TrainingError(
            f"with the same weights, trainer and engine differ by a factor of {_factor(start)} in "
            f"the probability of a sampled token, on average {_largest(metrics)}, more than "
            f"failure.max_start_mismatch={limit:.12g}: temperature, chat template, precision or "
            "the weights that are served differ; nothing was trained. Look at the tokens with "
            "`agentrl mismatch RUN`; raise the limit for an engine of lower precision"
        )


def warn_of_mismatch(
    progress: Progress, failure: FailureConfig, metrics: Mapping[str, Any]
) -> Metrics:
    """Count a step with a mismatch that is suspicious, and say so the first time.

    Returns:
        ``mismatch/warnings``, of the run so far; nothing where none was measured.
    """
    found, limit = judged(metrics, "exp_abs_mean"), failure.warn_mismatch
    if found is None:
        return {}
    if not found <= limit:
        progress.mismatch_warnings += 1
        if progress.mismatch_warnings == 1:
            logger.warning(
                "step %d: with the same weights, trainer and engine differ by a factor of %s in "
                "the probability of a sampled token, on average %s, more than "
                "failure.warn_mismatch=%.12g. Which tokens: agentrl mismatch RUN. Further steps "
                "are counted in mismatch/warnings",
                progress.step + 1,
                _factor(found),
                _largest(metrics),
                limit,
            )
    return {"mismatch/warnings": progress.mismatch_warnings}


def _factor(value: float) -> str:
    """Write a factor so that one near 1 does not read as 1, which any bound would allow."""
    excess = value - 1.0
    return f"1 + {excess:.2g}" if 0.0 < excess < 1e-3 else f"{value:.4g}"


def _largest(metrics: Mapping[str, Any]) -> str:
    largest = metrics.get("mismatch/logprob_abs_max", 0.0)
    return f"(largest difference of a log-probability: {largest:.3g})"


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
