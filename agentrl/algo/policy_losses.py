"""Policy losses: one number per trained token. Legend: ``M`` trained tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentrl.algo.kl import LOG_RATIO_LIMIT
from agentrl.algo.loss import LossInput, TokenLoss


@dataclass(slots=True, frozen=True, kw_only=True)
class Vanilla:
    """PPO's clip loss (arXiv 1707.06347) with its two bounds apart and a dual clip.

    ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and where ``A < 0`` at most ``-A dual``.
    """

    clip_low: float = 0.2
    """Ratios below ``1 - clip_low`` are clipped."""
    clip_high: float = 0.28
    """Ratios above ``1 + clip_high`` are clipped ("clip-higher", arXiv 2503.14476)."""
    dual_clip: float = 3.0
    """Where the advantage is negative, the loss is at most ``-advantage * dual_clip``
    (arXiv 1912.09729)."""

    def __call__(self, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token."""
        log_ratio = (inputs.logprobs.float() - inputs.old_logprobs).clamp(
            -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
        )
        ratio = log_ratio.exp()
        advantages = inputs.advantages
        free = -advantages * ratio
        bounded = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        pessimistic = torch.maximum(free, bounded)
        ceiling = -advantages * self.dual_clip
        over = (advantages < 0) & (pessimistic > ceiling)
        loss = torch.where(over, ceiling, pessimistic)
        return TokenLoss(loss, ratio.detach(), (bounded > free) | over)
