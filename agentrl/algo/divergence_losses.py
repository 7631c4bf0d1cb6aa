"""Policy losses bounded by how far the distribution moved, not by a ratio: DPPO (arXiv 2602.04879).

A ratio says little about the divergence: it is huge for a rare token that hardly matters, and near
1 for a frequent one that lost much of its mass. Here a token is measured as a coin, it or any
other: the divergence between its old and new probability. Tokens that went beyond the bound in the
direction that their advantage pushes have no gradient; the others have the policy gradient with a
capped importance weight, ``-A sg(min(r, max_ratio)) log pi``.

Legend: ``M`` trained tokens; ``A`` the advantage of a token, ``p`` its new and ``p_old`` its old
probability, ``r`` their ratio, ``sg`` a value without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentrl.algo.loss import LossInput, TokenLoss, require

PROBABILITY_FLOOR = 1e-8
"""Added to the probability of "any other token" before its logarithm is taken."""
_MAX_RATIO = "a ratio above 1; large ones (20) bias least"


@dataclass(slots=True, frozen=True, kw_only=True)
class DPPOTV:
    """Bounded by the total variation of the coin, ``|p - p_old|``."""

    uses_ratio: ClassVar[bool] = True

    tv_low: float = 0.15
    """Where ``A <= 0``: no gradient once ``p - p_old`` is below minus this."""
    tv_high: float = 0.15
    """Where ``A > 0``: no gradient once ``p - p_old`` is above this."""
    max_ratio: float = 20.0
    """Importance weights are capped here."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot work."""
        for name in ("tv_low", "tv_high"):
            bound = getattr(self, name)
            require(0 < bound <= 1, self, name, "a difference of probabilities: in (0, 1]")
        require(self.max_ratio > 1, self, "max_ratio", _MAX_RATIO)

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token."""
        moved = inputs.logprobs.detach().exp() - inputs.old_logprobs.exp()
        valid = torch.where(inputs.advantages > 0, moved <= self.tv_high, moved >= -self.tv_low)
        return _masked_policy_gradient(inputs, valid, self.max_ratio)


@dataclass(slots=True, frozen=True, kw_only=True)
class DPPOKL:
    """Bounded by the coin's KL divergence, ``KL(p_old || p)``."""

    uses_ratio: ClassVar[bool] = True

    kl_low: float = 0.05
    """Where ``A <= 0``: no gradient once ``p < p_old`` and the divergence, in nats, is above."""
    kl_high: float = 0.05
    """Where ``A > 0``: no gradient once ``p > p_old`` and the divergence, in nats, is above."""
    max_ratio: float = 20.0
    """Importance weights are capped here."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot work."""
        for name in ("kl_low", "kl_high"):
            require(getattr(self, name) > 0, self, name, "a divergence in nats: above 0")
        require(self.max_ratio > 1, self, "max_ratio", _MAX_RATIO)

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token."""
        new, old = inputs.logprobs.detach(), inputs.old_logprobs
        divergence = _binary_kl(old, new)
        valid = torch.where(
            inputs.advantages > 0,
            (divergence <= self.kl_high) | (new <= old),
            (divergence <= self.kl_low) | (new >= old),
        )
        return _masked_policy_gradient(inputs, valid, self.max_ratio)


def _binary_kl(old_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """KL(old || new) of "this token or any other", in nats: [M]."""
    # -expm1 keeps the digits of 1 - p that 1 - exp would lose where p is near 1.
    old_other = -torch.expm1(old_logprobs)
    new_other = -torch.expm1(logprobs)
    log_other = ((old_other + PROBABILITY_FLOOR) / (new_other + PROBABILITY_FLOOR)).log()
    return old_logprobs.exp() * (old_logprobs - logprobs) + old_other * log_other


def _masked_policy_gradient(inputs: LossInput, valid: Tensor, max_ratio: float) -> TokenLoss:
    ratio = inputs.log_ratio.detach().exp()
    loss = -inputs.advantages * ratio.clamp(max=max_ratio) * inputs.logprobs
    return TokenLoss(torch.where(valid, loss, 0.0), ratio, ~valid)
