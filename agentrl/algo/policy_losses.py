"""Policy losses that treat every token by itself.

Losses over sequences stand in :mod:`agentrl.algo.sequence_losses`, those that choose tokens of a
mini-batch in :mod:`agentrl.algo.covariance_losses`, those bounded by a divergence in
:mod:`agentrl.algo.divergence_losses`.

Legend: ``M`` trained tokens of a micro-batch; ``A`` a token's advantage, ``r`` its new over its old
probability, ``sg`` a value without gradient. All return [M] values, which the caller weighs and
adds up (:mod:`agentrl.algo.aggregate`): every loss honours every aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentrl.algo.loss import LossInput, TokenLoss, require


@dataclass(slots=True, frozen=True, kw_only=True)
class Vanilla:
    """PPO's clip loss (arXiv 1707.06347) with its two bounds apart and a dual clip.

    ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and where ``A < 0`` at most ``-A dual``.
    """

    uses_ratio: ClassVar[bool] = True

    clip_low: float = 0.2
    """Ratios below ``1 - clip_low`` are clipped."""
    clip_high: float = 0.28
    """Ratios above ``1 + clip_high`` are clipped ("clip-higher", arXiv 2503.14476)."""
    dual_clip: float | None = 3.0
    """Where the advantage is negative, the loss is at most ``-advantage * dual_clip``
    (arXiv 1912.09729); None leaves it unbounded, as PPO has it."""

    def __post_init__(self) -> None:
        """Refuse bounds that cannot work."""
        check_clip_bounds(self, self.clip_low, self.clip_high)
        require(
            self.dual_clip is None or self.dual_clip > 1,
            self,
            "dual_clip",
            "a ratio above 1, or null for none; 3 is usual",
        )

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token."""
        ratio = inputs.log_ratio.exp()
        loss, clipped = clipped_surrogate(
            inputs.advantages, ratio, low=self.clip_low, high=self.clip_high
        )
        if self.dual_clip is not None:
            ceiling = -inputs.advantages * self.dual_clip
            over = (inputs.advantages < 0) & (loss > ceiling)
            loss, clipped = torch.where(over, ceiling, loss), clipped | over
        return TokenLoss(loss, ratio.detach(), clipped)


@dataclass(slots=True, frozen=True, kw_only=True)
class CISPO:
    """Clips the weight of a token instead of its gradient (arXiv 2506.13585).

    ``-sg(clip(r, 1 - low, 1 + high)) A log pi``: no token is without gradient.
    """

    uses_ratio: ClassVar[bool] = True

    clip_low: float = 1.0
    """Weights are at least ``1 - clip_low``; the paper has no lower bound, which is 1."""
    clip_high: float = 0.28
    """Weights are at most ``1 + clip_high``. The paper tunes it and does not give its value."""

    def __post_init__(self) -> None:
        """Refuse bounds that cannot work."""
        check_clip_bounds(self, self.clip_low, self.clip_high)

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token."""
        ratio = inputs.log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return TokenLoss(-weight * inputs.advantages * inputs.logprobs, ratio, weight != ratio)


@dataclass(slots=True, frozen=True, kw_only=True)
class SAPO:
    """A smooth gate in place of the clip (arXiv 2511.20347).

    ``-A sigmoid(tau (r - 1)) 4 / tau``: at ``r = 1`` its gradient is that of ``-A r``, and it fades
    on both sides. Nothing is ever cut off, so ``clipped`` is False throughout.
    """

    uses_ratio: ClassVar[bool] = True

    tau_pos: float = 1.0
    """How fast the gradient fades where the advantage is positive."""
    tau_neg: float = 1.05
    """The same where it is not: a little faster, for stability (the paper's default)."""

    def __post_init__(self) -> None:
        """Refuse temperatures that cannot work."""
        require(self.tau_pos > 0, self, "tau_pos", "a number above 0; 1.0 is the paper's")
        require(self.tau_neg > 0, self, "tau_neg", "a number above 0; 1.05 is the paper's")

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token."""
        ratio, advantages = inputs.log_ratio.exp(), inputs.advantages
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg)
        gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
        never = torch.zeros_like(advantages, dtype=torch.bool)
        return TokenLoss(-advantages * gate, ratio.detach(), never)


@dataclass(slots=True, frozen=True, kw_only=True)
class DRO:
    """Policy gradient with a quadratic pull to the old policy (arXiv 2405.19107, 2501.12599).

    ``-(A log pi - beta / 2 (log pi - log pi_old)^2)``: for data of another policy, without ratios.
    """

    uses_ratio: ClassVar[bool] = False

    beta: float
    """Weight of the pull, in units of the advantage: it has no default that fits all. The policy
    settles where ``log pi - log pi_old = A / beta``."""

    def __post_init__(self) -> None:
        """Refuse a pull that is none."""
        require(self.beta > 0, self, "beta", "a number above 0, such as 0.05")

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token."""
        # Not the clamped log ratio: the pull must not vanish where it is needed most.
        distance = inputs.logprobs - inputs.old_logprobs
        loss = -(inputs.advantages * inputs.logprobs - 0.5 * self.beta * distance.square())
        return _unclipped(inputs, loss)


@dataclass(slots=True, frozen=True, kw_only=True)
class Reinforce:
    """The plain policy gradient, ``-A log pi``: no ratio, no clip.

    Importance weights come from ``algo.correction``. Under the name ``gpg`` it is the loss of GPG
    (arXiv 2504.02546), whose scaling is in the advantage estimator of that name.
    """

    uses_ratio: ClassVar[bool] = False

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token."""
        return _unclipped(inputs, -inputs.advantages * inputs.logprobs)


def clipped_surrogate(
    advantages: Tensor, ratio: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's pessimistic loss of each token and whether the clip acts, both [M]."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(free, bounded), bounded > free


def check_clip_bounds(loss: object, clip_low: float, clip_high: float) -> None:
    """Refuse bounds of a ratio that cannot work.

    Raises:
        ConfigError: the bounds do not enclose 1.
    """
    require(
        0 < clip_low <= 1,
        loss,
        "clip_low",
        "how far a ratio may fall below 1: above 0 and at most 1 (1: no lower bound)",
    )
    require(clip_high > 0, loss, "clip_high", "how far a ratio may rise above 1: above 0")


def _unclipped(inputs: LossInput, loss: Tensor) -> TokenLoss:
    never = torch.zeros_like(loss, dtype=torch.bool)
    return TokenLoss(loss, inputs.log_ratio.detach().exp(), never)
