"""The vocabulary pass on a GPU: two Triton kernels that read logits once each.

They compute what :mod:`agentrl.dist.head` computes with torch, in float32 registers over logits of
any type, and hold nothing of the size of the logits but their gradient.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false
# Kernels are launched with options that their signatures do not name.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


def statistics(
    logits: Tensor, targets: Tensor, temperature: float, all_fields: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probability, entropy, sum of squared probabilities and log-normalizer.

    Args:
        logits: [M, V], contiguous.
        targets: int64 [M].
        temperature: logits are divided by it.
        all_fields: False leaves out entropy and squares; the log-probability stands in their place.

    Returns:
        Four of float32 [M].
    """
    found = torch.empty(4, len(logits), dtype=torch.float32, device=logits.device)
    logprobs, entropy, squares, normalizer = found.unbind(0)
    if len(logits):
        _statistics_kernel[(len(logits),)](
            logits,
            targets,
            logprobs,
            entropy,
            squares,
            normalizer,
            logits.shape[1],
            1.0 / temperature,
            ALL_FIELDS=all_fields,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return (logprobs, entropy, squares, normalizer) if all_fields else (
        logprobs, logprobs, logprobs, normalizer
    )  # fmt: skip


def gradient_of_logits(
    logits: Tensor,
    targets: Tensor,
    found: Sequence[Tensor],
    temperature: float,
    grads: Sequence[Tensor | None],
) -> Tensor:
    """Return the gradient of logits, [M, V] of their dtype; leaves them as they are.

    Args:
        logits, targets, temperature: as of :func:`statistics`.
        found: what it returned.
        grads: of log-probability, entropy and squares: [M], or None for no gradient.
    """
    out = torch.empty_like(logits)
    _, entropy, squares, normalizer = (value.contiguous() for value in found)
    wanted = [grad is not None for grad in grads]
    given = [normalizer if grad is None else grad.contiguous() for grad in grads]
    if len(logits):
        _gradient_kernel[(len(logits), triton.cdiv(logits.shape[1], _BLOCK))](
            logits,
            targets,
            entropy,
            squares,
            normalizer,
            *given,
            out,
            logits.shape[1],
            1.0 / temperature,
            OF_LOGPROB=wanted[0],
            OF_ENTROPY=wanted[1],
            OF_SQUARES=wanted[2],
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return out


@triton.jit
def _statistics_kernel(
    logits,
    targets,
    logprobs,
    entropy,
    squares,
    normalizer,
    vocabulary,
    scale,
    ALL_FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row. Sums are kept relative to the largest logit so far."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * vocabulary
    largest = tl.full((), -1e30, tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)  # of e = exp(x - largest)
    weighted = tl.zeros((BLOCK,), tl.float32)  # of e (x - largest)
    squared = tl.zeros((BLOCK,), tl.float32)  # of e^2
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(base + columns, mask=columns < vocabulary, other=float("-inf"))
        x = x.to(tl.float32) * scale
        new = tl.maximum(largest, tl.max(x, 0))
        drop = largest - new
        shrink = tl.exp(drop)
        e = tl.exp(x - new)
        if ALL_FIELDS:
            weighted = (weighted + sums * drop) * shrink + tl.where(e > 0, e * (x - new), 0.0)
            squared = squared * (shrink * shrink) + e * e
        sums = sums * shrink + e
        largest = new
    total = tl.sum(sums, 0)
    log_total = tl.log(total)
    target = tl.load(targets + row)
    x_target = tl.load(base + target).to(tl.float32) * scale
    tl.store(normalizer + row, largest + log_total)
    tl.store(logprobs + row, x_target - largest - log_total)
    if ALL_FIELDS:
        tl.store(entropy + row, log_total - tl.sum(weighted, 0) / total)
        tl.store(squares + row, tl.sum(squared, 0) / (total * total))


@triton.jit
def _gradient_kernel(
    logits,
    targets,
    entropy,
    squares,
    normalizer,
    of_logprob,
    of_entropy,
    of_squares,
    out,
    vocabulary,
    scale,
    OF_LOGPROB: tl.constexpr,
    OF_ENTROPY: tl.constexpr,
    OF_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row and block of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    x = tl.load(logits + row * vocabulary + columns, mask=inside, other=0.0).to(tl.float32)
    log_prob = x * scale - tl.load(normalizer + row)
    prob = tl.exp(log_prob)
    factor = tl.zeros((BLOCK,), tl.float32)
    if OF_ENTROPY:
        surprise = tl.where(prob > 0, log_prob, 0.0) + tl.load(entropy + row)
        factor -= tl.load(of_entropy + row) * surprise
    if OF_SQUARES:
        factor += 2.0 * tl.load(of_squares + row) * (prob - tl.load(squares + row))
    if OF_LOGPROB:
        given = tl.load(of_logprob + row)
        target = tl.load(targets + row)
        gradient = prob * (factor - given) + tl.where(columns == target, given, 0.0)
    else:
        gradient = prob * factor
    tl.store(out + row * vocabulary + columns, gradient * scale, mask=inside)
