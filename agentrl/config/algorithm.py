"""Refuses algorithm settings that cannot run, or would train something else than meant.

An estimator that the trainer cannot feed is refused here, never at the first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from agentrl.algo.config import (
    AlgoConfig,
    CorrectionWeight,
    CreditConfig,
    KLPlace,
    OldLogprobs,
    correction_problems,
)
from agentrl.errors import AgentRLError, ConfigError
from agentrl.kwargs import check_kwargs

if TYPE_CHECKING:
    from agentrl.config.schema import Config

NORM_MODE = "seq-mean-token-sum-norm"
_DISCOUNTS = ("gamma", "lam")


def algorithm_problems(config: Config) -> Iterable[str]:
    """Yield what is wrong with ``algo``, one line each."""
    yield from credit_problems(config.algo, config, key="algo")
    yield from _loss(config.algo)
    yield from _kl(config.algo)
    yield from correction_problems(config.algo.correction)
    yield from _groups(config)


def credit_problems(credit: CreditConfig, config: Config, *, key: str) -> Iterable[str]:
    """Yield what is wrong with an estimator and its inputs.

    Args:
        key: where the settings stand, for messages.
    """
    from agentrl.algo.credit import NEEDS, get_estimator

    weights = credit.reward_weights
    for name, weight in weights.items():
        if not math.isfinite(weight):
            yield f"{key}.reward_weights.{name}={weight}: must be a finite number (1 is customary)"
    if not any(weights.values()):
        yield f"{key}.reward_weights={dict(weights)}: every weight is 0, so no reward is left"
    try:
        estimator = get_estimator(credit.advantage)
        check_kwargs(
            estimator,
            _with_discounts(credit, key),
            key=f"{key}.advantage_kwargs",
            given=("batch",),
        )
    except AgentRLError as error:
        yield f"{key}.advantage={credit.advantage!r}: {error}"
        return
    for name in _DISCOUNTS:
        value = getattr(credit, name)
        if value is not None and not 0 <= value <= 1:
            yield f"{key}.{name}={value}: must be between 0 and 1"
    if config.rollout.n < estimator.min_group:
        yield (
            f"rollout.n={config.rollout.n} with {key}.advantage={credit.advantage}: it compares "
            f"the samples of a prompt, and a group below {estimator.min_group} has no baseline, so "
            "every advantage would be 0; use at least 2 (8 is customary)"
        )
    provided = {"old_logprobs", "sum_pi_squared", "greedy_rewards", "anchors"}
    if config.rollout.tree.rounds:
        provided.add("tree")
        if "tree" not in estimator.needs:
            yield (
                f"rollout.tree.rounds={config.rollout.tree.rounds} with "
                f"{key}.advantage={credit.advantage}: it takes the samples of a prompt for "
                "independent, but branches share the turns before them; use an estimator for trees "
                "(algo.advantage=tree), or rollout.tree.rounds=0"
            )
    for need in sorted(estimator.needs - provided):
        yield (
            f"{key}.advantage={credit.advantage} needs {NEEDS[need]}, which this run does not "
            f"have; {_FIX[need]}"
        )


_FIX = {
    "values": "there is no critic yet: use an estimator without one (turn_return credits turns)",
    "tree": "set rollout.tree.rounds above 0",
}


def _with_discounts(credit: CreditConfig, key: str) -> Mapping[str, Any]:
    """Arguments of the estimator; discounts that are set twice are refused.

    Raises:
        ConfigError: ``gamma`` or ``lam`` stands in two places.
    """
    kwargs = dict(credit.advantage_kwargs)
    for name in _DISCOUNTS:
        value = getattr(credit, name)
        if value is not None and name in kwargs:
            raise ConfigError(f"{key}.{name} and {key}.advantage_kwargs.{name}: set one of them")
        if value is not None:
            kwargs[name] = float(value)
    return kwargs


def _loss(algo: AlgoConfig) -> Iterable[str]:
    from agentrl.algo.aggregate import AGGREGATIONS
    from agentrl.algo.loss import LOSSES, make_loss

    try:
        check_kwargs(LOSSES.get(algo.loss), algo.loss_kwargs, key="algo.loss_kwargs")
        loss = make_loss(algo.loss, algo.loss_kwargs)
    except AgentRLError as error:
        yield f"algo.loss={algo.loss!r}: {error}"
        return
    if not math.isfinite(algo.entropy_coef):
        yield f"algo.entropy_coef={algo.entropy_coef}: must be a finite number (0 is customary)"
    if algo.loss_agg_tokens is not None and algo.loss_agg_tokens < 1:
        yield f"algo.loss_agg_tokens={algo.loss_agg_tokens}: must be at least 1"
    if (
        algo.loss_agg_tokens is not None
        and algo.loss_agg != NORM_MODE
        and algo.loss_agg in (AGGREGATIONS)
    ):
        yield (
            f"algo.loss_agg_tokens={algo.loss_agg_tokens} is read by loss_agg={NORM_MODE} only, "
            f"not by {algo.loss_agg}: leave one of the two out"
        )
    bypass = algo.old_logprobs is OldLogprobs.rollout
    if bypass and loss.uses_ratio and algo.correction.weight is not CorrectionWeight.none:
        yield (
            f"algo.correction.weight={algo.correction.weight} with algo.old_logprobs=rollout: the "
            f"ratio of {algo.loss} is against the engine's probabilities already, so the "
            "correction would be counted twice; set algo.old_logprobs=recompute, or "
            "algo.loss=reinforce, which has no ratio"
        )


def _kl(algo: AlgoConfig) -> Iterable[str]:
    from agentrl.algo.kl import KL_KINDS

    kl = algo.kl
    if not (kl.coef >= 0 and math.isfinite(kl.coef)):
        yield f"algo.kl.coef={kl.coef}: must be a finite number of at least 0 (1e-3 is customary)"
    if kl.kind not in KL_KINDS:
        yield f"algo.kl.kind={kl.kind!r} is unknown; known: {', '.join(KL_KINDS)}"
    elif kl.where is KLPlace.reward and kl.kind.endswith("+"):
        yield (
            f"algo.kl.kind={kl.kind} with algo.kl.where=reward: a reward has no gradient, which is "
            f"all that the + changes; write {kl.kind.rstrip('+')}"
        )
    if kl.target is not None:
        if not (kl.target > 0 and math.isfinite(kl.target)):
            yield f"algo.kl.target={kl.target}: must be a finite number above 0"
        if kl.coef == 0:
            yield (
                f"algo.kl.target={kl.target} with algo.kl.coef=0: an adaptive coefficient is "
                "multiplied, so it would stay 0; start from 1e-3 or so"
            )
    if kl.horizon < 1:
        yield f"algo.kl.horizon={kl.horizon}: must be at least 1"


def _groups(config: Config) -> Iterable[str]:
    from agentrl.algo.credit import get_estimator

    groups = config.algo.groups
    if not 0 < groups.variance_top_p <= 1:
        yield f"algo.groups.variance_top_p={groups.variance_top_p}: must be above 0, at most 1"
    if groups.refill and groups.max_refills < 1:
        yield (
            f"algo.groups.max_refills={groups.max_refills} with algo.groups.refill=true: must be "
            "at least 1"
        )
    if not groups.refill and groups.variance_top_p == 1.0:
        return
    try:
        grouped = get_estimator(config.algo.advantage).min_group > 1
    except AgentRLError:
        return  # reported above
    if not grouped:
        yield (
            f"algo.groups.refill and algo.groups.variance_top_p look at the rewards of a group, "
            f"which algo.advantage={config.algo.advantage} does not compare; leave them out, or "
            "use grpo"
        )
