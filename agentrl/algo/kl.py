"""Estimates of KL(policy || reference) from the log-probabilities of sampled tokens.

With ``d = log pi - log pi_ref``: ``k1 = d`` (unbiased, high variance), ``k2 = d^2 / 2`` (its
gradient is that of the KL), ``k3 = e^-d + d - 1`` (unbiased, low variance, never negative).
"""

from __future__ import annotations

from torch import Tensor

KL_KINDS: dict[str, str] = {
    "k1": "d",
    "k2": "d^2 / 2",
    "k3": "e^-d + d - 1",
}
"""Name -> formula."""

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to this on both sides before they are exponentiated."""
K3_LIMIT = 10.0
"""k3 of a single token is clamped to this."""


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Return one estimate per token, float32, of the shape of the inputs.

    Raises:
        ValueError: ``kind`` is none of :data:`KL_KINDS`.
    """
    difference = logprobs.float() - ref_logprobs.float()
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        clamped = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        return ((-clamped).exp() + clamped - 1).clamp(-K3_LIMIT, K3_LIMIT)
    raise ValueError(f"unknown KL estimate {kind!r}; known: {', '.join(KL_KINDS)}")


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Return the term of a loss, with gradient; shapes as in :func:`kl_estimate`."""
    return kl_estimate(logprobs, ref_logprobs, kind)
