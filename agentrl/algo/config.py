"""Settings of the algorithm. Imports no torch, so that a command line can compose it fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class OldLogprobs(StrEnum):
    """Where the log-probabilities of the behaviour policy come from. Named as written."""

    rollout = "rollout"
    """The engine's own (two policies: "bypass"); the mismatch with the trainer is measured in the
    first update."""
    recompute = "recompute"
    """A forward pass of the trainer before the first update (three policies: "decoupled")."""


class KLPlace(StrEnum):
    """Where the distance to the reference policy acts."""

    loss = "loss"
    """Added to the loss, with gradient."""
    reward = "reward"
    """Taken from the reward of every token, before advantages are computed."""


class CorrectionWeight(StrEnum):
    """The importance weight of a token: trainer's over engine's probability."""

    none = "none"
    """No weight."""
    token = "token"
    """Of the token alone."""
    sequence = "sequence"
    """The product over all sampled tokens of the trajectory."""
    geometric = "geometric"
    """The geometric mean over them."""


@dataclass(slots=True, kw_only=True)
class CreditConfig:
    """From rewards to advantages."""

    advantage: str = "grpo"
    """Estimator: a name of ``agentrl.algo.credit.ESTIMATORS`` or ``./file.py:function``."""
    advantage_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the estimator, checked against its signature."""
    gamma: float | None = None
    """Discount, for estimators that discount; None leaves the estimator's own default."""
    lam: float | None = None
    """Lambda of generalised advantage estimation; None leaves the estimator's own default."""
    reward_weights: dict[str, float] = field(
        default_factory=lambda: {"outcome": 1.0, "turn": 1.0, "tool": 1.0}
    )
    """Name -> weight in the return: ``outcome`` (the rubric), ``turn`` (``env.step``), ``tool``
    (what tools pay), and any part that the rubric names, which then counts by itself."""


@dataclass(slots=True, kw_only=True)
class KLConfig:
    """Distance to the policy that the run started from."""

    coef: float = 0.0
    """Weight; 0 needs no reference policy and loads none."""
    kind: str = "k3"
    """Estimate: ``k1``, ``k2``, ``k3`` or ``abs``; a ``+`` at the end keeps its value and takes the
    gradient of ``k2``."""
    where: KLPlace = KLPlace.loss
    """In the loss or in the reward."""
    target: float | None = None
    """KL per token that an adaptive coefficient steers to; None keeps the coefficient."""
    horizon: int = 10_000
    """Trajectories over which an adaptive coefficient reacts."""


REJECT_STATISTICS: dict[str, str] = {
    "token_k1": "-log r of the token",
    "token_k2": "(log r)^2 / 2 of the token",
    "token_k3": "r - 1 - log r of the token",
    "seq_sum_k1": "sum of k1 over the trajectory",
    "seq_sum_k2": "sum of k2 over the trajectory",
    "seq_sum_k3": "sum of k3 over the trajectory",
    "seq_mean_k1": "mean of k1 over the trajectory (the geometric mean ratio)",
    "seq_mean_k2": "mean of k2 over the trajectory",
    "seq_mean_k3": "mean of k3 over the trajectory",
    "seq_max_k2": "largest k2 of the trajectory",
    "seq_max_k3": "largest k3 of the trajectory",
}
"""Name -> formula, with ``r`` the trainer's over the engine's probability of a sampled token."""


@dataclass(slots=True, kw_only=True)
class RejectConfig:
    """One rule that takes tokens or trajectories out of the loss."""

    statistic: str
    """``token_k1..k3``, ``seq_sum_k1..k3``, ``seq_mean_k1..k3``, ``seq_max_k2``, ``seq_max_k3``."""
    high: float
    """Rejected above. For ``k1`` a bound of ``exp(k1)``, the *engine's over the trainer's*
    probability: 2 rejects what the trainer finds less than half as likely as the engine did."""
    low: float | None = None
    """For ``k1`` the other bound of that ratio; None takes ``1 / high``. ``k2`` and ``k3`` measure
    a distance and have no lower bound."""

    @property
    def lowest(self) -> float:
        """Lower bound of the ratio of ``k1``."""
        return 1 / self.high if self.low is None else self.low


@dataclass(slots=True, kw_only=True)
class CorrectionConfig:
    """What is done about the trainer's probabilities differing from those sampled with."""

    weight: CorrectionWeight = CorrectionWeight.none
    """Importance weight that multiplies the loss of a token."""
    upper: float = 2.0
    """Weights above are cut to this (truncated importance sampling)."""
    lower: float | None = None
    """With a lower end, weights outside of ``[lower, upper]`` become 0 instead (IcePop)."""
    normalize: bool = False
    """Divide weights by their mean over what is trained on: its tokens for ``token``, its
    trajectories for ``sequence`` and ``geometric``."""
    reject: list[RejectConfig] = field(default_factory=list)
    """Rules that take tokens out of the loss and of its denominators; all must be passed."""


def correction_problems(config: CorrectionConfig) -> Iterator[str]:
    """Yield what cannot work about the bounds, one line each; nothing if all is well."""
    if not config.upper > 0:
        yield f"algo.correction.upper={config.upper}: must be above 0"
    if config.lower is not None and not 0 < config.lower <= config.upper:
        yield (
            f"algo.correction.lower={config.lower}: must be above 0 and at most "
            f"upper={config.upper}; without it weights are cut to upper only"
        )
    seen: set[str] = set()
    for rule in config.reject:
        name = f"algo.correction.reject, {rule.statistic!r}"
        if rule.statistic not in REJECT_STATISTICS:
            yield f"{name}: no such statistic; known: {', '.join(REJECT_STATISTICS)}"
            continue
        if rule.statistic in seen:
            yield f"{name}: stands there twice; keep the tighter rule"
        seen.add(rule.statistic)
        if not rule.high > 0:
            yield f"{name}: high={rule.high} must be above 0"
        elif not rule.statistic.endswith("k1"):
            if rule.low is not None:
                yield f"{name}: measures a distance and takes no low; got low={rule.low}"
        elif not 0 < rule.lowest <= rule.high:
            yield (
                f"{name}: a ratio needs 0 < low <= high, got low={rule.lowest:g} (1 / high if "
                f"left out), high={rule.high:g}"
            )


@dataclass(slots=True, kw_only=True)
class GroupsConfig:
    """Which groups are trained on."""

    drop_zero_advantage: bool = True
    """Leave out groups in which every advantage is 0: they would only dilute the mean."""
    refill: bool = False
    """Sample further prompts in place of groups without signal (DAPO's dynamic sampling)."""
    max_refills: int = 64
    """Groups refilled in one step; then the step trains on what has a signal."""
    variance_top_p: float = 1.0
    """Keep the groups of highest reward variance that make up this share of its sum; 1 keeps
    all (arXiv 2604.06268)."""


@dataclass(slots=True, kw_only=True)
class AlgoConfig(CreditConfig):
    """Advantage and loss. Presets stand in ``configs/algo``."""

    loss: str = "vanilla"
    """Loss of a token: a name of ``agentrl.algo.loss.LOSSES`` or ``./file.py:Class``."""
    loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the loss (clip bounds and the like), checked against its fields."""
    loss_agg: str = "token-mean"
    """How token losses are weighed: a name of ``agentrl.algo.aggregate.AGGREGATIONS``."""
    loss_agg_tokens: int | None = None
    """What ``seq-mean-token-sum-norm`` divides by; None takes ``rollout.max_response_tokens``."""
    old_logprobs: OldLogprobs = OldLogprobs.rollout
    """Where the log-probabilities of the policy that sampled come from."""
    entropy_coef: float = 0.0
    """Bonus per nat of entropy."""
    kl: KLConfig = field(default_factory=KLConfig)
    """Distance to the policy that the run started from."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """What is done about the trainer's probabilities differing from those sampled with."""
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    """Which groups are trained on."""
