"""Refuses algorithm settings that cannot run, or would train something else than meant.

An estimator that the trainer cannot feed is refused here, never at the first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from agentrl.algo.config import (
    AlgoConfig,
    CorrectionConfig,
    CorrectionWeight,
    GroupsConfig,
    KLConfig,
    KLPlace,
    OldLogprobs,
    correction_problems,
)
from agentrl.config.credit import LARGEST_WEIGHT, credit_problems
from agentrl.env.entries import environments
from agentrl.errors import AgentRLError

if TYPE_CHECKING:
    from agentrl.config.schema import Config

NORM_MODE = "seq-mean-token-sum-norm"
MOST_TOKENS = 1_000_000_000


def algorithm_problems(config: Config) -> Iterable[str]:
    """Yield what is wrong with ``algo``, one line each."""
    if not all(entry.algo.get("advantage") for entry in environments(config.env)):
        yield from credit_problems(config.algo, config, key="algo")
    yield from _loss(config.algo)
    yield from _aggregation(config.algo)
    yield from _kl(config.algo)
    yield from _correction(config.algo)
    yield from _groups(config.algo.groups)


def _loss(algo: AlgoConfig) -> Iterable[str]:
    from agentrl.algo.loss import make_loss

    if not abs(algo.entropy_coef) <= LARGEST_WEIGHT:
        yield f"algo.entropy_coef={algo.entropy_coef}: must be a finite number (0 is customary)"
    for name, value in algo.loss_kwargs.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"algo.loss_kwargs.{name}={value}: must be a finite number"
    try:
        loss = make_loss(algo.loss, algo.loss_kwargs)
    except AgentRLError as error:
        text = str(error)
        yield text if text.startswith("algo.loss") else f"algo.loss={algo.loss!r}: {text}"
        return
    except (Exception, SystemExit) as error:  # of the user's own class
        yield (
            f"algo.loss={algo.loss!r}: the constructor raised {type(error).__name__}: {error}; "
            f"see algo.loss_kwargs={dict(algo.loss_kwargs)}"
        )
        return
    bypass = algo.old_logprobs is OldLogprobs.rollout
    if bypass and loss.uses_ratio and algo.correction.weight is not CorrectionWeight.none:
        yield (
            f"algo.correction.weight={algo.correction.weight} with algo.old_logprobs=rollout: the "
            f"ratio of {algo.loss} is against the engine's probabilities already, so the "
            "correction would be counted twice; set algo.old_logprobs=recompute, or "
            "algo.loss=reinforce, which has no ratio"
        )


def _aggregation(algo: AlgoConfig) -> Iterable[str]:
    from agentrl.algo.aggregate import AGGREGATIONS

    tokens = algo.loss_agg_tokens
    if tokens is None:
        return
    if not 1 <= tokens <= MOST_TOKENS:
        yield f"algo.loss_agg_tokens={tokens}: must be from 1 to {MOST_TOKENS:,}"
    elif algo.loss_agg != NORM_MODE and algo.loss_agg in AGGREGATIONS:
        yield (
            f"algo.loss_agg_tokens={tokens} is read by algo.loss_agg={NORM_MODE} only, not by "
            f"{algo.loss_agg}: leave one of the two out"
        )


def _kl(algo: AlgoConfig) -> Iterable[str]:
    from agentrl.algo.kl import KL_KINDS

    kl = algo.kl
    if not 0 <= kl.coef <= LARGEST_WEIGHT:
        yield f"algo.kl.coef={kl.coef}: must be from 0 to {LARGEST_WEIGHT:g} (1e-3 is customary)"
    if kl.kind not in KL_KINDS:
        yield f"algo.kl.kind={kl.kind!r} is unknown; known: {', '.join(KL_KINDS)}"
    elif kl.where is KLPlace.reward and kl.kind.endswith("+"):
        yield (
            f"algo.kl.kind={kl.kind} with algo.kl.where=reward: a reward has no gradient, which is "
            f"all that the + changes; write {kl.kind.rstrip('+')}"
        )
    elif kl.where is KLPlace.loss and kl.kind == "k1" and kl.coef:
        yield (
            "algo.kl.kind=k1 with algo.kl.where=loss: its gradient is 0 in the mean, so nothing "
            "would hold the policy near the reference; use k2 or k3, or k1+, which keeps the value"
        )
    yield from _adaptive_kl(kl)


def _adaptive_kl(kl: KLConfig) -> Iterable[str]:
    if kl.horizon < 1:
        yield f"algo.kl.horizon={kl.horizon}: must be at least 1"
    elif kl.target is None and kl.horizon != KLConfig().horizon:
        yield (
            f"algo.kl.horizon={kl.horizon} without algo.kl.target: the coefficient stays as it is; "
            "set algo.kl.target, or leave the horizon out"
        )
    if kl.target is None:
        return
    if not (kl.target > 0 and math.isfinite(kl.target)):
        yield f"algo.kl.target={kl.target}: must be a finite number above 0"
    if kl.coef == 0:
        yield (
            f"algo.kl.target={kl.target} with algo.kl.coef=0: an adaptive coefficient is "
            "multiplied, so it would stay 0; start from 1e-3 or so"
        )


def _correction(algo: AlgoConfig) -> Iterable[str]:
    correction = algo.correction
    yield from correction_problems(correction)
    if correction.weight is not CorrectionWeight.none:
        return
    for name in ("upper", "lower", "normalize"):
        value = getattr(correction, name)
        if value != getattr(CorrectionConfig(), name):
            yield (
                f"algo.correction.{name}={value} with algo.correction.weight=none: there is no "
                "weight that it could bound; set algo.correction.weight to token, sequence or "
                f"geometric, or leave {name} out"
            )


def _groups(groups: GroupsConfig) -> Iterable[str]:
    if not 0 < groups.variance_top_p <= 1:
        yield (
            f"algo.groups.variance_top_p={groups.variance_top_p}: must be above 0 and at most 1, "
            "which keeps every group"
        )
    if groups.refill and not groups.drop_zero_advantage:
        yield (
            "algo.groups.refill=true with algo.groups.drop_zero_advantage=false: groups without "
            "signal would be replaced, and train beside their replacements; leave one of the two "
            "out"
        )
    if groups.max_refills < 1:
        yield (
            f"algo.groups.max_refills={groups.max_refills}: must be at least 1; to refill nothing "
            "set algo.groups.refill=false"
        )
    elif not groups.refill and groups.max_refills != GroupsConfig().max_refills:
        yield (
            f"algo.groups.max_refills={groups.max_refills} without algo.groups.refill: nothing "
            "would be refilled; set algo.groups.refill=true, or leave max_refills out"
        )
