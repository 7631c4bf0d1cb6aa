"""How far the trainer's probabilities are from those of the engine that sampled.

Both hold the same weights, so anything beyond rounding is a bug: another temperature, another
template, stale or scrambled weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algo.kl import kl_estimate

RATIO_BAND = (0.5, 2.0)
"""Probability ratios outside of this are counted as out of bounds."""


def mismatch(
    trainer_logprobs: Tensor, engine_logprobs: Tensor, loss_mask: Tensor, *, num_tokens: int
) -> dict[str, float]:
    """Compare two log-probabilities of the same sampled tokens.

    Args:
        trainer_logprobs, engine_logprobs: float [N].
        loss_mask: bool [N]; other tokens are ignored.
        num_tokens: what the means divide by: the trained tokens of the whole mini-batch, so that
            the values of its micro-batches add up (``logprob_abs_max`` is combined by maximum).

    Returns:
        ``mismatch/{logprob_abs_mean,logprob_abs_max,k3_kl,ratio_oob_fraction}``; k3 estimates
        KL(engine || trainer).
    """
    trainer = trainer_logprobs.detach()[loss_mask].float()
    engine = engine_logprobs.detach()[loss_mask].float()
    distance = (trainer - engine).abs()
    ratio = (trainer - engine).exp()
    outside = (ratio < RATIO_BAND[0]) | (ratio > RATIO_BAND[1])
    total = max(num_tokens, 1)
    return {
        "mismatch/logprob_abs_mean": float(distance.sum()) / total,
        "mismatch/logprob_abs_max": float(distance.max()) if len(distance) else 0.0,
        "mismatch/k3_kl": float(kl_estimate(engine, trainer, "k3").sum()) / total,
        "mismatch/ratio_oob_fraction": int(torch.count_nonzero(outside)) / total,
    }
