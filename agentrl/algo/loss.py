"""Policy losses: the loss of every token, and how a mini-batch sums them.

Legend: ``N`` tokens of a micro-batch. Values at tokens that are not trained are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from agentrl.algo.kl import LOG_RATIO_LIMIT, kl_estimate
from agentrl.algo.mismatch import mismatch
from agentrl.batch import Batch


@dataclass(slots=True, frozen=True, kw_only=True)
class Clip:
    """Bounds of the probability ratio."""

    low: float = 0.2
    """Ratios below ``1 - low`` are clipped."""
    high: float = 0.28
    """Ratios above ``1 + high`` are clipped ("clip-higher", arXiv 2503.14476)."""
    dual: float = 3.0
    """Where the advantage is negative, the loss is at most ``-advantage * dual``
    (arXiv 1912.09729)."""


@dataclass(slots=True, frozen=True)
class TokenLoss:
    """What a loss says of each token; all [N]."""

    loss: Tensor
    """float32, with gradient."""
    ratio: Tensor
    """float32, new over old probability."""
    clipped: Tensor
    """bool: the gradient is cut off."""


class TokenLossFn(Protocol):
    """A loss per token."""

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip
    ) -> TokenLoss:
        """Return the loss of each of the [N] tokens."""
        ...


def vanilla(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: Clip) -> TokenLoss:
    """Return the PPO clip loss (arXiv 1707.06347) with its two bounds apart and a dual clip.

    ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and where ``A < 0`` at most ``-A dual``.
    """
    log_ratio = (logprobs.float() - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    pessimistic = torch.maximum(free, bounded)
    ceiling = -advantages * clip.dual
    over = (advantages < 0) & (pessimistic > ceiling)
    loss = torch.where(over, ceiling, pessimistic)
    return TokenLoss(loss, ratio.detach(), (bounded > free) | over)


LOSSES: dict[str, TokenLossFn] = {"vanilla": vanilla}


@dataclass(slots=True, frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of a policy: a :class:`~agentrl.dist.engine.LossFn`.

    Reads the token fields ``loss_mask``, ``advantages``, ``old_logprobs`` (of the policy that the
    ratio is against), ``loss_weights`` (:func:`~agentrl.algo.aggregate.token_weights` over the
    whole mini-batch); ``ref_logprobs`` if ``kl_coef`` is not 0; and ``logprobs`` (the engine's) if
    ``measure_mismatch``.

    Metrics are shares of the mini-batch: those of its micro-batches add up to means over trained
    tokens. Names that end in ``_max`` are combined by maximum.
    """

    num_tokens: int
    """Trained tokens of the whole mini-batch, over all ranks."""
    loss: str = "vanilla"
    clip: Clip = Clip()
    entropy_coef: float = 0.0
    """Bonus per nat of entropy; needs the engine to be asked for entropy."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference policy in the loss."""
    kl_kind: str = "k3"
    measure_mismatch: bool = False
    """Also report :func:`~agentrl.algo.mismatch.mismatch`: on before the first update only."""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, batch: Batch
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the micro-batch's share of the loss, and of the metrics."""
        mask = batch.tokens["loss_mask"]
        weights = batch.tokens["loss_weights"][mask]
        new, old = logprobs[mask], batch.tokens["old_logprobs"][mask]
        token_loss = LOSSES[self.loss](new, old, batch.tokens["advantages"][mask], self.clip)
        per_token = token_loss.loss
        total = max(self.num_tokens, 1)
        metrics = {
            "pg_clipfrac": int(torch.count_nonzero(token_loss.clipped)) / total,
            "kl": float(kl_estimate(old, new.detach(), "k3").sum()) / total,
            "ratio_max": float(token_loss.ratio.max()) if len(new) else 0.0,
        }
        if self.kl_coef:
            penalty = kl_estimate(new, batch.tokens["ref_logprobs"][mask], self.kl_kind)
            per_token = per_token + self.kl_coef * penalty
            metrics["ref_kl"] = float(penalty.detach().sum()) / total
        if entropy is not None:
            metrics["entropy"] = float(entropy.detach()[mask].sum()) / total
            if self.entropy_coef:
                per_token = per_token - self.entropy_coef * entropy[mask]
        elif self.entropy_coef:
            raise ValueError("entropy_coef is set, but the engine was not asked for entropy")
        if self.measure_mismatch:
            metrics |= mismatch(logprobs, batch.tokens["logprobs"], mask, num_tokens=total)
        loss = (per_token * weights).sum()
        metrics["loss"] = float(loss.detach())
        return loss, metrics


@dataclass(slots=True, frozen=True, kw_only=True)
class SupervisedLoss:
    """Negative log-likelihood of the trained tokens, in nats.

    Reads ``loss_mask`` and ``loss_weights``, the weight of every token in the mini-batch.
    """

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, batch: Batch
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the micro-batch's share of the loss."""
        mask = batch.tokens["loss_mask"]
        loss = -(logprobs[mask] * batch.tokens["loss_weights"][mask]).sum()
        return loss, {"loss": float(loss.detach())}
