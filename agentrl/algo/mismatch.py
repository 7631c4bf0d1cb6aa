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
    trainer_logprobs: Tensor, engine_logprobs: Tensor, *, num_tokens: int
) -> dict[str, Tensor]:
    """Compare two log-probabilities of the same sampled tokens.

    Args:
        trainer_logprobs, engine_logprobs: float [M], of the trained tokens.
        num_tokens: what the means divide by: the trained tokens of the whole mini-batch, so that
            the values of its micro-batches add up (``logprob_abs_max`` is combined by maximum).

    Returns:
        ``mismatch/{logprob_abs_mean,logprob_abs_max,k3_kl,ratio_oob_fraction}``; k3 estimates
        KL(engine || trainer).
    """
    trainer, engine = trainer_logprobs.detach().float(), engine_logprobs.detach().float()
    distance = (trainer - engine).abs()
    ratio = (trainer - engine).exp()
    outside = (ratio < RATIO_BAND[0]) | (ratio > RATIO_BAND[1])
    total = max(num_tokens, 1)
    return {
        "mismatch/logprob_abs_mean": distance.sum() / total,
        "mismatch/logprob_abs_max": (distance.max() if len(distance) else distance.new_zeros(())),
        "mismatch/k3_kl": kl_estimate(engine, trainer, "k3").sum() / total,
        "mismatch/ratio_oob_fraction": torch.count_nonzero(outside) / total,
    }
