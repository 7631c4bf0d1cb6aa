"""Scores of tokens from hidden states, in chunks of the vocabulary pass.

Log-probability, entropy and sum of squared probabilities come from one pass over logits. Logits
that fit one chunk are kept for the backward pass; of more chunks there is one at a time, and the
backward pass computes it again, so that nothing of size [M, V] ever exists.

With ``x`` logits after temperature, ``p`` probabilities, ``H`` entropy and ``S`` the sum of
squared probabilities, gradients are::

    d log p_y / d x_v = [v = y] - p_v
    d H       / d x_v = -p_v (log p_v + H)
    d S       / d x_v = 2 p_v (p_v - S)

A score whose gradient nobody asks for adds nothing to the backward pass.

Legend: ``M`` scored tokens, ``V`` vocabulary, ``C`` width of the model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_LOGITS = {"cpu": 2**26, "cuda": 2**31}
"""Elements of one chunk of logits, by type of device: 256 MiB in float32, 4 GiB in bfloat16."""
POLICY_FIELDS = ("logprobs", "entropy", "sum_pi_squared")


def token_scores(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    fields: Sequence[str],
) -> tuple[Tensor, ...]:
    """Score tokens by the logits ``states @ weight.T + bias``.

    Args:
        states: [M, C] hidden states at the positions before the tokens.
        weight: [V, C]; ``bias``: [V] or None.
        targets: int64 [M], the tokens.
        temperature: logits are divided by it.
        fields: of :data:`POLICY_FIELDS`.

    Returns:
        One float32 [M] per field, with gradient.
    """
    dtype = states.dtype
    if torch.is_autocast_enabled(states.device.type):
        dtype = torch.get_autocast_dtype(states.device.type)
    found: Any = _VocabularyPass.apply(
        states, weight, bias, targets, temperature, dtype, tuple(fields) != ("logprobs",)
    )
    scores: dict[str, Tensor] = dict(zip(POLICY_FIELDS, found, strict=True))
    return tuple(scores[name] for name in fields)


def scores_of_logits(
    logits: Tensor, targets: Tensor, *, temperature: float, fields: Sequence[str]
) -> tuple[Tensor, ...]:
    """Score tokens by logits [M, V] that a model has computed in a way of its own."""
    log_probs = (logits.float() / temperature).log_softmax(-1)
    probs = log_probs.exp()
    scores = {
        "logprobs": lambda: log_probs.gather(1, targets[:, None]).sum(1),
        "entropy": lambda: -(probs * log_probs).sum(-1),
        "sum_pi_squared": lambda: probs.square().sum(-1),
    }
    return tuple(scores[name]() for name in fields)


class _VocabularyPass(torch.autograd.Function):
    """(states, weight, bias) -> log-probability, entropy, sum of squared probabilities."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
        all_fields: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype = temperature, dtype
        matrix = weight.to(dtype)
        spans = _spans(len(targets), len(weight), states.device)
        found: list[tuple[Tensor, ...]] = []
        kept: list[Tensor] = []
        for span in spans:
            logits = _logits(states[span].to(dtype), matrix, bias)
            found.append(_kernels(logits)[0](logits, targets[span], temperature, all_fields))
            if len(spans) == 1:
                kept.append(logits)
        scores = [torch.cat(column) for column in zip(*found, strict=True)]
        ctx.save_for_backward(states, weight, bias, targets, *scores, *kept)
        return (scores[0], scores[1], scores[2]) if all_fields else (scores[0], None, None)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets, *scores = ctx.saved_tensors
        kept = scores[4:]
        matrix = weight.to(ctx.dtype)
        of_states, of_weight = ctx.needs_input_grad[:2]
        d_states = torch.empty_like(states) if of_states else None
        d_weight: Tensor | None = None
        d_bias: Tensor | None = None
        spans = _spans(len(targets), len(weight), states.device)
        for span in spans:
            part = states[span].to(ctx.dtype)
            logits = kept[0] if kept else _logits(part, matrix, bias)
            d_logits = _kernels(logits)[1](
                logits,
                targets[span],
                [score[span] for score in scores[:4]],
                ctx.temperature,
                [None if grad is None else grad[span] for grad in grads],
            )
            if d_states is not None:
                d_states[span] = (d_logits @ matrix).to(d_states.dtype)
            # Sums over chunks are taken in float32, whatever the products are made of.
            exact = weight.dtype if len(spans) == 1 else torch.float32
            if of_weight:
                d_weight = _add(d_weight, _product(d_logits.T, part, exact))
            if bias is not None:
                d_bias = _add(d_bias, d_logits.sum(0, dtype=exact))
        d_weight, d_bias = (None if d is None else d.to(weight.dtype) for d in (d_weight, d_bias))
        return d_states, d_weight, d_bias, None, None, None, None


def _spans(num_tokens: int, vocabulary: int, device: torch.device) -> list[slice]:
    """Cut M tokens, or none, into equal chunks of at most :data:`MAX_LOGITS` logits."""
    most = max(1, MAX_LOGITS.get(device.type, MAX_LOGITS["cuda"]) // vocabulary)
    chunks = max(1, -(-num_tokens // most))
    size = -(-num_tokens // chunks)
    return [slice(size * i, min(size * (i + 1), num_tokens)) for i in range(chunks)]


def _kernels(logits: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what takes statistics of logits, and what takes their gradient."""
    if not logits.is_cuda or importlib.util.find_spec("triton") is None:
        return _statistics, _gradient_of_logits
    from agentrl.dist import head_kernels

    return head_kernels.statistics, head_kernels.gradient_of_logits


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply matrices; ``dtype`` of the result may be wider than theirs."""
    if left.dtype == dtype:
        return left @ right
    return torch.mm(left, right, out_dtype=dtype) if left.is_cuda else (left @ right).to(dtype)


def _add(total: Tensor | None, value: Tensor) -> Tensor:
    return value if total is None else total.add_(value)


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(states, weight, None if bias is None else bias.to(weight.dtype))


def _statistics(
    logits: Tensor, targets: Tensor, temperature: float, all_fields: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_probs = _scaled(logits, temperature).log_softmax(-1)
    logprobs = log_probs.gather(1, targets[:, None]).squeeze(1)
    if not all_fields:
        return logprobs, logprobs, logprobs, logprobs
    probs = log_probs.exp()
    entropy = -log_probs.mul_(probs).sum(-1)
    # Only the other kernels need the normalizer: here a softmax is as fast as what it saves.
    return logprobs, entropy, probs.square_().sum(-1), logprobs


def _gradient_of_logits(
    logits: Tensor,
    targets: Tensor,
    found: Sequence[Tensor],
    temperature: float,
    grads: Sequence[Tensor | None],
) -> Tensor:
    """Return the gradient of logits, in their dtype; leaves them as they are."""
    _, entropy, squares, _ = found
    of_logprob, of_entropy, of_squares = (
        None if grad is None else (grad / temperature)[:, None] for grad in grads
    )
    scaled = _scaled(logits, temperature)
    probs = scaled.softmax(-1)
    total = torch.zeros_like(probs[:, :1]) if of_logprob is None else -of_logprob
    if of_entropy is not None:
        surprise = scaled.log_softmax(-1).add_(entropy[:, None])
        total = total - surprise.mul_(of_entropy)
    if of_squares is not None:
        total = total + (probs - squares[:, None]).mul_(2 * of_squares)
    probs.mul_(total)
    if of_logprob is not None:
        probs.scatter_add_(1, targets[:, None], of_logprob)
    return probs.to(logits.dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    return logits.float() if temperature == 1.0 else logits.float() / temperature
