"""Refuses settings of asynchronous training that cannot keep its bound, or ignore its age.

Samples of older policies are trained only with something that corrects for their age.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentrl.algo.config import CorrectionWeight
from agentrl.rollout.config import Stragglers

if TYPE_CHECKING:
    from agentrl.config.schema import Config

_MAX_AHEAD = 1_000_000
"""Prompts; without ``cut`` the end of the run bounds them. Catches a slip of the hand."""


def asynchrony_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with how far sampling may run ahead, one line each."""
    yield from _run_ahead(config)
    yield from _window(config)
    yield from _correction(config)


def _run_ahead(config: Config) -> Iterator[str]:
    rollout, size = config.rollout, config.trainer.prompts_per_step
    ahead, in_time = rollout.oversubscribe, rollout.max_staleness * size
    cuts = rollout.stragglers is Stragglers.cut
    if ahead is not None and ahead < 0:
        yield f"rollout.oversubscribe={ahead}: must be at least 0, or null"
    elif ahead is not None and ahead > in_time and not cuts:
        yield (
            f"rollout.oversubscribe={ahead} with rollout.stragglers=carry: of what is sampled "
            f"ahead, rollout.max_staleness={rollout.max_staleness} times "
            f"trainer.prompts_per_step={size} prompts, {in_time}, can still be trained in time; "
            "lower the first, raise rollout.max_staleness, or give the slow ones up with "
            "rollout.stragglers=cut"
        )
    elif cuts and (in_time if ahead is None else ahead) > _MAX_AHEAD:
        yield (
            f"rollout.oversubscribe={'null' if ahead is None else ahead} with "
            f"rollout.stragglers=cut and rollout.max_staleness={rollout.max_staleness}: so many "
            "prompts would be begun at once, to be cut; set rollout.oversubscribe to a part of "
            f"trainer.prompts_per_step={size}, such as {max(size // 4, 1)}, and at most "
            f"{_MAX_AHEAD}"
        )
    if cuts and not (in_time if ahead is None else ahead):
        yield (
            f"rollout.stragglers=cut with rollout.oversubscribe={'null' if ahead is None else 0}: "
            "a step needs every prompt that is sampled, so none can be cut; set "
            f"rollout.oversubscribe to a part of trainer.prompts_per_step={size}, such as "
            f"{max(size // 4, 1)}"
        )


def _window(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.window < 0:
        yield f"rollout.window={rollout.window}: must be at least 0"
    elif rollout.window and rollout.stragglers is Stragglers.cut:
        yield (
            f"rollout.window={rollout.window} with rollout.stragglers=cut: a step then takes "
            "whatever is finished first, however far behind; leave the window out"
        )
    elif rollout.window and not rollout.max_staleness:
        yield (
            f"rollout.window={rollout.window} with rollout.max_staleness=0: every prompt is due in "
            "the step it was sampled for, so none can wait while others leave before it; set "
            "rollout.max_staleness to at least 1, or leave the window out"
        )


def _correction(config: Config) -> Iterator[str]:
    correction = config.algo.correction
    uncorrected = correction.weight is CorrectionWeight.none and not correction.reject
    if config.rollout.max_staleness and uncorrected:
        yield (
            f"rollout.max_staleness={config.rollout.max_staleness} with "
            f"algo.correction.weight={correction.weight} and "
            f"algo.old_logprobs={config.algo.old_logprobs}: updates would be held near the "
            "policies that sampled, which are older ones; set algo.old_logprobs=recompute and "
            "algo.correction.weight=token (decoupled PPO), or reject what has drifted too far with "
            "algo.correction.reject"
        )
