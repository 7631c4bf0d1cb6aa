from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentrl.algo.covariance_losses import SELECTED, ClipCov, KLCov
from agentrl.algo.loss import LossInput, PolicyLoss, PreparedLoss

# Means: A 0, log pi -2. Covariances: 3, -3, 0.5, -0.5, 1.5, -1.5
ADVANTAGES = torch.tensor([2.0, -2.0, 1.0, -1.0, 1.0, -1.0])
LOGPROBS = torch.tensor([-0.5, -0.5, -1.5, -1.5, -0.5, -0.5]) - 1.1666666
OLD = LOGPROBS.clone()


def _covariances(logprobs: Tensor, advantages: Tensor) -> list[float]:
    mean_a = sum(advantages.tolist()) / len(advantages)
    mean_l = sum(logprobs.tolist()) / len(logprobs)
    pairs = zip(advantages.tolist(), logprobs.tolist(), strict=True)
    return [(a - mean_a) * (value - mean_l) for a, value in pairs]


def _prepare(
    loss: PreparedLoss, logprobs: Tensor, advantages: Tensor, *, seed: int = 0, old: Tensor
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return loss.prepare(logprobs, advantages, old_logprobs=old, generator=generator)[SELECTED]


def _apply(loss: ClipCov | KLCov, new: Tensor, old: Tensor, a: Tensor, chosen: Tensor) -> Tensor:
    row = torch.zeros(len(new), dtype=torch.int64)
    inputs = LossInput(
        logprobs=new, old_logprobs=old, advantages=a, row=row, num_rows=1, extra={SELECTED: chosen}
    )
    return loss(inputs).loss


def _random(seed: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -4 * torch.rand(size, generator=generator)
    new = old + 0.3 * torch.randn(size, generator=generator)
    return new, old, 2 * torch.randn(size, generator=generator)


def test_kl_cov_chooses_the_highest_covariances() -> None:
    new, old, advantages = _random(0, 200)
    chosen = _prepare(KLCov(share=0.05), new, advantages, old=old)
    ranked = sorted(range(200), key=_covariances(new, advantages).__getitem__, reverse=True)
    assert set(chosen.nonzero().flatten().tolist()) == set(ranked[:10])


def test_clip_cov_chooses_at_random_between_its_bounds() -> None:
    new, old, advantages = _random(1, 400)
    loss = ClipCov(share=0.02, cov_low=0.5, cov_high=3.0)
    ratios = (new - old).exp().tolist()
    allowed = {
        index
        for index, cov in enumerate(_covariances(new, advantages))
        if 0.5 < cov < 3.0
        and not (advantages[index] > 0 and ratios[index] > 1.28)
        and not (advantages[index] < 0 and ratios[index] < 0.8)
    }
    choices = [
        frozenset(_prepare(loss, new, advantages, seed=seed, old=old).nonzero().flatten().tolist())
        for seed in range(20)
    ]
    assert all(len(choice) == 8 and choice <= allowed for choice in choices)
    assert len(set(choices)) > 10
    assert choices[3] == frozenset(
        _prepare(loss, new, advantages, seed=3, old=old).nonzero().flatten().tolist()
    )


def test_one_token_is_chosen_where_the_share_is_less_than_one() -> None:
    assert int(_prepare(KLCov(), LOGPROBS, ADVANTAGES, old=OLD).sum()) == 1
    assert int(_prepare(ClipCov(), LOGPROBS, ADVANTAGES, old=OLD).sum()) <= 1


def test_clip_cov_chooses_nothing_where_nothing_lies_between_its_bounds() -> None:
    loss = ClipCov(share=1.0, cov_low=50.0, cov_high=60.0)
    assert not _prepare(loss, LOGPROBS, ADVANTAGES, old=OLD).any()


def test_an_empty_mini_batch_chooses_nothing() -> None:
    none = torch.zeros(0)
    for loss in (ClipCov(), KLCov()):
        assert len(_prepare(loss, none, none, old=none)) == 0


def test_clip_cov_takes_the_chosen_tokens_out_and_leaves_the_others_to_the_clip() -> None:
    new, old, advantages = _random(2, 50)
    chosen = torch.arange(50) % 5 == 0
    new.requires_grad_()
    got = _apply(ClipCov(), new, old, advantages, chosen)
    got.sum().backward()
    values = got.tolist()
    assert new.grad is not None and not new.grad[chosen].any() and bool(new.grad[~chosen].any())
    ratios = (new.detach() - old).exp().tolist()
    for index in range(50):
        r, a = ratios[index], float(advantages[index])
        plain = 0.0 if chosen[index] else max(-a * r, -a * min(max(r, 0.8), 1.28))
        assert values[index] == pytest.approx(plain, abs=1e-5)


def test_kl_cov_penalises_the_chosen_tokens_and_clips_none() -> None:
    new, old, advantages = _random(3, 50)
    chosen = torch.arange(50) % 5 == 0
    got = _apply(KLCov(kl_coef=0.7), new, old, advantages, chosen)
    for index in range(50):
        log_ratio, a = float(new[index] - old[index]), float(advantages[index])
        plain = -a * math.exp(log_ratio) + (0.7 * abs(log_ratio) if chosen[index] else 0.0)
        assert float(got[index]) == pytest.approx(plain, abs=1e-5)


def test_the_gradient_of_kl_cov_equals_finite_differences() -> None:
    new, old, advantages = (value.double() for value in _random(4, 30))
    chosen = torch.arange(30) % 3 == 0
    new.requires_grad_()
    _apply(KLCov(), new, old, advantages, chosen).sum().backward()
    step = 1e-6
    up, down = (_apply(KLCov(), new.detach() + s * step, old, advantages, chosen) for s in (1, -1))
    assert new.grad is not None
    torch.testing.assert_close(new.grad, (up - down) / (2 * step), atol=1e-7, rtol=1e-6)


def test_a_loss_that_chooses_is_not_used_without_its_choice() -> None:
    for loss in (ClipCov(), KLCov()):
        assert isinstance(loss, PreparedLoss)
        with pytest.raises(ValueError, match="prepare"):
            PolicyLoss(token_loss=loss, num_tokens=1)
