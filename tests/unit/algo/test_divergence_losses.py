from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from agentrl.algo.divergence_losses import DPPOKL, DPPOTV
from agentrl.algo.loss import LossInput


def _inputs(new: Tensor, old: Tensor, advantages: Tensor) -> LossInput:
    row = torch.zeros(len(new), dtype=torch.int64)
    return LossInput(logprobs=new, old_logprobs=old, advantages=advantages, row=row, num_rows=1)


def _gradient(loss: DPPOTV | DPPOKL, p: float, p_old: float, advantage: float) -> float:
    new = torch.tensor([math.log(p)], requires_grad=True)
    out = loss(_inputs(new, torch.tensor([math.log(p_old)]), torch.tensor([advantage])))
    out.loss.sum().backward()
    assert new.grad is not None
    assert bool(out.clipped) is (float(new.grad) == 0.0)
    return float(new.grad)


@pytest.mark.parametrize(
    ("p", "p_old", "advantage", "weight"),
    [
        (0.5, 0.4, 2.0, 1.25),  # moved by 0.1: inside
        (0.6, 0.4, 2.0, 0.0),  # moved by 0.2 in the direction of its advantage
        (0.6, 0.4, -2.0, 1.5),  # ... against it: pushed back
        (0.4, 0.6, -2.0, 0.0),
        (0.4, 0.6, 2.0, 2 / 3),
        (0.01, 0.0001, 2.0, 20.0),  # a ratio of 100 moves next to nothing: kept, its weight capped
    ],
)
def test_total_variation_by_hand(p: float, p_old: float, advantage: float, weight: float) -> None:
    got = _gradient(DPPOTV(tv_low=0.15, tv_high=0.15), p, p_old, advantage)
    assert got == pytest.approx(-advantage * weight, rel=1e-5)


def _kl(p_old: float, p: float) -> float:
    return p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old) / (1 - p))


@pytest.mark.parametrize("p", [0.02, 0.2, 0.4, 0.45, 0.75, 0.95, 0.999])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_kl_cuts_what_went_beyond_it_in_the_direction_of_the_advantage(
    p: float, advantage: float
) -> None:
    beyond = _kl(0.5, p) > 0.05 and (p > 0.5) == (advantage > 0)
    got = _gradient(DPPOKL(), p, 0.5, advantage)
    assert got == pytest.approx(0.0 if beyond else -advantage * p / 0.5, rel=1e-5)


def test_values_equal_the_formula_in_plain_floats() -> None:
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(200, generator=generator)
    new = (old + 0.7 * torch.randn(200, generator=generator)).clamp(max=-0.01)
    advantages = torch.randn(200, generator=generator)
    tv, kl = DPPOTV(max_ratio=1.5), DPPOKL(max_ratio=1.5)
    got_tv, got_kl = (loss(_inputs(new, old, advantages)).loss.tolist() for loss in (tv, kl))
    cut = 0
    for index in range(200):
        p, q, a = math.exp(new[index]), math.exp(old[index]), float(advantages[index])
        loss = -a * min(p / q, 1.5) * math.log(p)
        valid_tv = p - q <= 0.15 if a > 0 else p - q >= -0.15
        valid_kl = _kl(q, p) <= 0.05 or (p <= q if a > 0 else p >= q)
        assert got_tv[index] == pytest.approx(loss if valid_tv else 0.0, abs=1e-5)
        assert got_kl[index] == pytest.approx(loss if valid_kl else 0.0, abs=1e-5)
        cut += (not valid_tv) + (not valid_kl)
    assert 20 < cut < 380


@pytest.mark.parametrize("loss", [DPPOTV(), DPPOKL()])
def test_certain_and_impossible_tokens_are_finite(loss: DPPOTV | DPPOKL) -> None:
    new = torch.tensor([0.0, 0.0, -200.0, -200.0], requires_grad=True)
    old = torch.tensor([-200.0, 0.0, 0.0, -200.0])
    out = loss(_inputs(new, old, torch.tensor([1.0, -1.0, 1.0, -1.0])))
    out.loss.sum().backward()
    assert new.grad is not None and bool(new.grad.isfinite().all())
    assert bool(out.loss.isfinite().all())
