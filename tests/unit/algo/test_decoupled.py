"""Decoupled PPO (arXiv 2505.24298, equation 5) is a choice of settings, not a loss of its own."""

from __future__ import annotations

import torch

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.config import CorrectionConfig, CorrectionWeight
from agentrl.algo.correction import correct
from agentrl.algo.loss import PolicyLoss, make_loss
from agentrl.batch import Batch


def test_token_weights_on_recomputed_logprobs_are_decoupled_ppo() -> None:
    """``E[pi_prox / pi_behave * min(u A, clip(u) A)]`` with ``u = pi / pi_prox``."""
    generator = torch.Generator().manual_seed(0)

    def logprobs() -> torch.Tensor:
        return -2 * torch.rand(24, generator=generator)

    present, proximal, behaviour = logprobs().requires_grad_(), logprobs(), logprobs()
    advantages = torch.randn(24, generator=generator)
    mask = torch.rand(24, generator=generator) < 0.8
    mask[:1] = False
    session = torch.arange(24) // 8
    weight = CorrectionConfig(weight=CorrectionWeight.token, upper=1e9)
    corrected = correct(proximal, behaviour, mask, session, weight)
    assert corrected.weights is not None
    turn = torch.where(mask, 0, -1)
    totals = denominators(mask, session, turn)
    batch = Batch.from_rows(
        {
            "ids": list(torch.zeros(24, dtype=torch.int64).split(8)),
            "loss_mask": list(mask.split(8)),
            "old_logprobs": list(proximal.split(8)),
            "advantages": list(advantages.split(8)),
            "is_weights": list(corrected.weights.split(8)),
            "loss_weights": list(
                token_weights(mask, session, turn, "token-mean", totals, norm_tokens=1).split(8)
            ),
        },
        {"session": torch.arange(3)},
    )
    kwargs = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    loss = PolicyLoss(token_loss=make_loss("vanilla", kwargs), num_tokens=int(mask.sum()))
    got, _ = loss({"logprobs": present}, batch)
    (gradient,) = torch.autograd.grad(got, present)

    theta = present.detach().clone().requires_grad_()
    u = (theta - proximal).exp()
    surrogate = torch.minimum(u * advantages, u.clamp(0.8, 1.2) * advantages)
    behave_weight = (proximal - behaviour).exp()
    want = -(behave_weight * surrogate)[mask].mean()
    (wanted,) = torch.autograd.grad(want, theta)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradient, wanted)
    # The naive loss, whose clip is around the behaviour policy, is another one.
    naive_u = (theta - behaviour).exp()
    naive = torch.minimum(naive_u * advantages, naive_u.clamp(0.8, 1.2) * advantages)
    assert not torch.allclose(got, -naive[mask].mean())
