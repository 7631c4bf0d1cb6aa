"""Policy losses whose ratio is that of a whole sequence.

A sequence is a row: the text of one segment, as one forward pass sees it. The ratio of a row is
without gradient; each token carries its own, scaled so that the gradients of a row's tokens add up
to that of the row's loss. So a token keeps its own advantage (credit per turn reaches the update),
and any aggregation can weigh it. Where all tokens of a row have the same advantage and sessions are
one row long, ``seq-mean-token-mean`` gives value and gradient of the papers.

Legend: ``M`` trained tokens, ``B`` rows of a micro-batch; ``A`` the advantage of a token, ``sg`` a
value without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentrl.algo.kl import LOG_RATIO_LIMIT
from agentrl.algo.loss import LossInput, TokenLoss, require
from agentrl.algo.policy_losses import check_clip_bounds, clipped_surrogate

MAX_LOG_SEQUENCE_RATIO = 10.0
"""Rows whose mean log ratio is above this have no gradient under GSPO."""


@dataclass(slots=True, frozen=True, kw_only=True)
class GSPO:
    """PPO's clip on the geometric mean ratio of a row (arXiv 2507.18071, its form per token).

    ``s = exp(log pi - sg(log pi) + sg(mean_t log r))``, then ``max(-A s, -A clip(s))``.
    """

    uses_ratio: ClassVar[bool] = True

    clip_low: float = 3e-4
    """Ratios of a row below ``1 - clip_low`` are clipped. A mean over a row varies far less than
    the ratio of a token, hence the small bounds (the paper's)."""
    clip_high: float = 4e-4
    """Ratios of a row above ``1 + clip_high`` are clipped."""

    def __post_init__(self) -> None:
        """Refuse bounds that cannot work."""
        check_clip_bounds(self, self.clip_low, self.clip_high)

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token."""
        difference = (inputs.logprobs - inputs.old_logprobs).detach()
        log_ratio = _row_mean(difference, inputs)[inputs.row]
        bounded = (log_ratio + _gradient_only(inputs.logprobs)).clamp(
            -LOG_RATIO_LIMIT, MAX_LOG_SEQUENCE_RATIO
        )
        ratio = bounded.exp()
        loss, clipped = clipped_surrogate(
            inputs.advantages, ratio, low=self.clip_low, high=self.clip_high
        )
        return TokenLoss(loss, ratio.detach(), clipped | (log_ratio > MAX_LOG_SEQUENCE_RATIO))


@dataclass(slots=True, frozen=True, kw_only=True)
class GeoMean:
    """GMPO: the geometric mean of a row's clipped ratios (arXiv 2507.20673).

    ``-A exp(l - sg(l) + sg(mean_t l))`` with ``l`` the log ratio of a token, at most ``clip_high``
    where ``A > 0``, at least ``-clip_low`` where ``A < 0``, and 0 where ``A = 0``.
    """

    uses_ratio: ClassVar[bool] = True

    clip_low: float = 0.4
    """*Log* ratios below minus this are clipped: the paper's range is ``(e^-0.4, e^0.4)``."""
    clip_high: float = 0.4
    """*Log* ratios above this are clipped."""

    def __post_init__(self) -> None:
        """Refuse bounds that cannot work."""
        for name in ("clip_low", "clip_high"):
            bound = getattr(self, name)
            require(
                bound > 0, self, name, "how far a log ratio may go from 0: above 0, such as 0.4"
            )

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token."""
        log_ratio, advantages = inputs.log_ratio, inputs.advantages
        bounded = torch.where(
            advantages > 0, log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low)
        )
        bounded = torch.where(advantages == 0, 0.0, bounded)
        row_ratio = _row_mean(bounded.detach(), inputs).exp()[inputs.row]
        loss = -advantages * row_ratio * _gradient_only(bounded).exp()
        clipped = (advantages != 0) & (bounded != log_ratio)
        return TokenLoss(loss, row_ratio, clipped)


def _row_mean(values: Tensor, inputs: LossInput) -> Tensor:
    """Mean of [M] values over the trained tokens of each row, [B]; 0 for a row without any."""
    zeros = values.new_zeros(inputs.num_rows)
    count = zeros.index_add(0, inputs.row, torch.ones_like(values))
    return zeros.index_add(0, inputs.row, values) / count.clamp(min=1)


def _gradient_only(values: Tensor) -> Tensor:
    """Zeros with the gradient of ``values``."""
    return values - values.detach()
