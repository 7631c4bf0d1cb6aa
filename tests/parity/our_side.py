"""Our loss of a step, along the path that training takes."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.loss import PolicyLoss, PreparedLoss, TokenLossFn
from tests.parity.bridge import Ragged

NORM_TOKENS = 64
"""What seq-mean-token-sum-norm divides by, on both sides."""


def policy_loss(
    step: Ragged,
    token_loss: TokenLossFn,
    mode: str,
    *,
    advantages: Tensor | None = None,
    old: str = "old_logprobs",
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    seed: int = 0,
) -> tuple[float, Tensor]:
    """Loss and its gradient by the log-probabilities, [N].

    Args:
        step: its field ``logprobs`` is differentiated by.
        token_loss: ours.
        mode: aggregation.
        advantages: float32 [B, T]; None for the field of that name.
        old: field with the policy that ratios are against.
        mask: bool [N], after rejection; None for all sampled tokens.
        weights: float32 [N], of the rollout correction.
        seed: of a choice by chance.
    """
    batch = step.batch(
        old_logprobs=step.fields[old],
        advantages=step.fields["advantages"] if advantages is None else advantages,
    )
    if mask is not None:
        batch.tokens["loss_mask"] = mask
    if weights is not None:
        batch.tokens["is_weights"] = weights
    kept = batch.tokens["loss_mask"]
    leaf = step.flat(step.fields["logprobs"]).requires_grad_()
    extra: dict[str, Tensor] = {}
    if isinstance(token_loss, PreparedLoss):
        extra = token_loss.prepare(
            leaf.detach()[kept],
            batch.tokens["advantages"][kept],
            old_logprobs=batch.tokens["old_logprobs"][kept],
            generator=torch.Generator().manual_seed(seed),
        )
        for name, value in extra.items():
            empty = torch.zeros(batch.num_tokens, dtype=value.dtype)
            batch.tokens[name] = empty.masked_scatter(kept, value)
    totals = denominators(kept, step.session_of_token)
    batch.tokens["loss_weights"] = token_weights(
        kept, step.session_of_token, None, mode, totals, norm_tokens=NORM_TOKENS
    )
    loss = PolicyLoss(token_loss=token_loss, num_tokens=totals.num_tokens, extra=tuple(extra))
    value, _ = loss({"logprobs": leaf}, batch)
    (gradient,) = torch.autograd.grad(value, leaf)
    return float(value.detach()), gradient
