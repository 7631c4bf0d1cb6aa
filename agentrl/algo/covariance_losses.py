"""Policy losses that hold back the few tokens which drive the entropy down (arXiv 2505.22617).

Those are tokens whose advantage and log-probability are high together:
``cov = (A - mean A)(log pi - mean log pi)`` over the trained tokens of the mini-batch. The choice
is made once over the whole mini-batch (``prepare``) and travels with it as a token field, so that
it does not depend on micro-batches or ranks.

Legend: ``M`` trained tokens; ``A`` a token's advantage, ``r`` its new over its old probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentrl.algo.kl import LOG_RATIO_LIMIT
from agentrl.algo.loss import LossInput, TokenLoss, require
from agentrl.algo.policy_losses import check_clip_bounds, clipped_surrogate

SELECTED = "cov_selected"
"""Token field, bool: the token is held back."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ClipCov:
    """PPO's clip, and no gradient for a random share of tokens of high covariance (Clip-Cov).

    ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and 0 at the chosen tokens. There is no dual clip,
    as in the source.
    """

    uses_ratio: ClassVar[bool] = True

    share: float = 2e-4
    """Share of the mini-batch's trained tokens that is chosen, at least one token."""
    cov_low: float = 1.0
    """Only tokens of a covariance above this are chosen from."""
    cov_high: float = 5.0
    """Only tokens of a covariance below this are chosen from."""
    clip_low: float = 0.2
    """Ratios below ``1 - clip_low`` are clipped."""
    clip_high: float = 0.28
    """Ratios above ``1 + clip_high`` are clipped."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot work."""
        check_clip_bounds(self, self.clip_low, self.clip_high)
        _check_share(self, self.share)
        require(
            self.cov_low < self.cov_high,
            self,
            "cov_low",
            f"a covariance below cov_high={self.cov_high}: no token lies between the two",
        )

    def prepare(
        self,
        logprobs: Tensor,
        advantages: Tensor,
        *,
        old_logprobs: Tensor,
        generator: torch.Generator,
    ) -> dict[str, Tensor]:
        """Choose among tokens within the bounds that the ratio's clip leaves a gradient."""
        ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        _, clipped = clipped_surrogate(advantages, ratio, low=self.clip_low, high=self.clip_high)
        covariance = _covariance(logprobs, advantages)
        within = (covariance > self.cov_low) & (covariance < self.cov_high) & ~clipped
        candidates = within.nonzero().squeeze(1)
        order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
        chosen = candidates[order[: _num_selected(self.share, len(logprobs))]]
        return {SELECTED: torch.zeros_like(within).index_fill(0, chosen, True)}

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token."""
        ratio, selected = inputs.log_ratio.exp(), inputs.extra[SELECTED]
        loss, clipped = clipped_surrogate(
            inputs.advantages, ratio, low=self.clip_low, high=self.clip_high
        )
        return TokenLoss(torch.where(selected, 0.0, loss), ratio.detach(), clipped | selected)


@dataclass(slots=True, frozen=True, kw_only=True)
class KLCov:
    """The ratio without a clip, and a penalty on the tokens of highest covariance (KL-Cov).

    ``-A r``, and ``+ kl_coef |log r|`` at the chosen tokens.
    """

    uses_ratio: ClassVar[bool] = True

    share: float = 2e-4
    """Share of the mini-batch's trained tokens that is penalised, at least one token. The paper
    takes 2e-3 for a model of 7B, 2e-4 for one of 32B parameters."""
    kl_coef: float = 1.0
    """Weight of the penalty (the paper's)."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot work."""
        _check_share(self, self.share)
        require(
            self.kl_coef > 0,
            self,
            "kl_coef",
            "a number above 0, such as 1.0: nothing else holds it",
        )

    def prepare(
        self,
        logprobs: Tensor,
        advantages: Tensor,
        *,
        old_logprobs: Tensor,
        generator: torch.Generator,
    ) -> dict[str, Tensor]:
        """Choose the tokens of highest covariance; nothing here is left to chance."""
        order = _covariance(logprobs, advantages).argsort(descending=True, stable=True)
        chosen = order[: _num_selected(self.share, len(logprobs))]
        nowhere = torch.zeros_like(logprobs, dtype=torch.bool)
        return {SELECTED: nowhere.index_fill(0, chosen, True)}

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token."""
        log_ratio, selected = inputs.log_ratio, inputs.extra[SELECTED]
        ratio = log_ratio.exp()
        penalty = torch.where(selected, self.kl_coef * log_ratio.abs(), 0.0)
        loss = -inputs.advantages * ratio + penalty
        return TokenLoss(loss, ratio.detach(), torch.zeros_like(selected))


def _covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Each token's part of the covariance, float64 [M]."""
    logprobs, advantages = logprobs.detach().double(), advantages.double()
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def _num_selected(share: float, num_tokens: int) -> int:
    return max(1, int(share * num_tokens))


def _check_share(loss: object, share: float) -> None:
    require(0 < share <= 1, loss, "share", "a share of tokens: above 0 and at most 1, such as 2e-4")
