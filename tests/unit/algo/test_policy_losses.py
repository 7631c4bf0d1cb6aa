from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algo.loss import LOSSES, LossInput, TokenLossFn, make_loss
from agentrl.algo.policy_losses import CISPO, DRO, SAPO, Reinforce, Vanilla
from agentrl.errors import ConfigError


def _inputs(new: Tensor, old: Tensor, advantages: Tensor) -> LossInput:
    row = torch.zeros(len(new), dtype=torch.int64)
    return LossInput(logprobs=new, old_logprobs=old, advantages=advantages, row=row, num_rows=1)


def _one(loss: TokenLossFn, ratio: float, advantage: float) -> tuple[float, float, bool]:
    """Loss, gradient by the new log-probability, and whether a bound acts, for one token."""
    old = torch.tensor([-2.0])
    new = (old + math.log(ratio)).requires_grad_()
    out = loss(_inputs(new, old, torch.tensor([advantage])))
    out.loss.sum().backward()
    assert new.grad is not None
    assert float(out.ratio) == pytest.approx(ratio, rel=1e-5)
    return float(out.loss.detach()), float(new.grad), bool(out.clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.27, 1.0, -1.27, -1.27, False),  # above 1 + low, still inside: clip-higher
        (1.5, 1.0, -1.28, 0.0, True),
        (0.5, 1.0, -0.5, -0.5, False),  # a good action that became rare is pulled back
        (0.5, -1.0, 0.8, 0.0, True),
        (2.0, -1.0, 2.0, 2.0, False),  # a bad action that became likely is pushed down
        (5.0, -1.0, 3.0, 0.0, True),  # ... up to the dual clip
        (5.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_vanilla_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    got = _one(Vanilla(clip_low=0.2, clip_high=0.28, dual_clip=3.0), ratio, advantage)
    assert got[:2] == pytest.approx((loss, gradient), abs=1e-5)
    assert got[2] is clipped


def test_without_a_dual_clip_a_bad_action_is_pushed_down_however_likely_it_became() -> None:
    assert _one(Vanilla(dual_clip=None), 5.0, -1.0) == (
        pytest.approx(5.0, abs=1e-4),
        pytest.approx(5.0, abs=1e-4),
        False,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [
        (1.0, 2.0, 1.0, False),
        (1.5, 2.0, 1.2, True),
        (0.1, -1.0, 0.5, True),
        (0.8, -1.0, 0.8, False),
    ],
)
def test_cispo_caps_the_weight_and_keeps_the_gradient(
    ratio: float, advantage: float, weight: float, clipped: bool
) -> None:
    loss, gradient, got_clipped = _one(CISPO(clip_low=0.5, clip_high=0.2), ratio, advantage)
    assert gradient == pytest.approx(-weight * advantage, rel=1e-5)
    assert loss == pytest.approx(-weight * advantage * (math.log(ratio) - 2), rel=1e-5)
    assert got_clipped is clipped


def test_cispo_has_no_lower_bound_by_default() -> None:
    assert _one(CISPO(), 0.01, 1.0)[1:] == (pytest.approx(-0.01, rel=1e-5), False)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_sapo_starts_as_the_policy_gradient_and_fades(advantage: float) -> None:
    at_one = _one(SAPO(), 1.0, advantage)[1]
    assert at_one == pytest.approx(-advantage, rel=1e-6)
    # sigmoid'(tau (r - 1)) * 4 r, at r = 3
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-2 * tau))
    faded = _one(SAPO(), 3.0, advantage)[1]
    assert faded == pytest.approx(-advantage * gate * (1 - gate) * 4 * 3, rel=1e-4)


def test_dro_pulls_back_beyond_the_point_where_it_settles() -> None:
    # A / beta = 0.5 / 0.25 = 2 nats: below, the token still gains; above, it loses.
    dro = DRO(beta=0.25)
    assert _one(dro, math.exp(1.0), 0.5)[:2] == pytest.approx((0.5 + 0.125, -0.25), abs=1e-4)
    assert _one(dro, math.exp(2.0), 0.5)[1] == pytest.approx(0.0, abs=1e-5)
    assert _one(dro, math.exp(3.0), 0.5)[1] == pytest.approx(0.25, abs=1e-5)


def test_the_pull_of_dro_has_no_limit() -> None:
    new = torch.tensor([0.0], requires_grad=True)
    loss = DRO(beta=0.1)(_inputs(new, torch.tensor([-30.0]), torch.tensor([0.0]))).loss
    loss.sum().backward()
    assert new.grad is not None and float(new.grad) == pytest.approx(3.0)


def test_reinforce_ignores_the_old_policy() -> None:
    for ratio in (0.1, 1.0, 10.0):
        loss, gradient, clipped = _one(Reinforce(), ratio, 1.5)
        assert (loss, gradient) == pytest.approx((-1.5 * (math.log(ratio) - 2), -1.5), rel=1e-5)
        assert clipped is False


def _plain(name: str, new: float, old: float, a: float) -> float:
    """The formulas once more, token by token, in plain floats."""
    r = math.exp(new - old)
    if name == "vanilla":
        loss = max(-a * r, -a * min(max(r, 0.8), 1.28))
        return min(loss, -3 * a) if a < 0 else loss
    if name == "cispo":
        return -min(max(r, 0.0), 1.28) * a * new
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))
    if name == "dro":
        return -(new * a - 0.5 * 0.3 * (new - old) ** 2)
    return -a * new


LOCAL = ["vanilla", "cispo", "sapo", "dro", "reinforce", "gpg"]


def _make(name: str) -> TokenLossFn:
    return make_loss(name, {"beta": 0.3} if name == "dro" else {})


def _random(seed: int, size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -4 * torch.rand(size, generator=generator, dtype=torch.float64)
    new = old + 0.6 * torch.randn(size, generator=generator, dtype=torch.float64)
    return new, old, torch.randn(size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", LOCAL)
def test_values_equal_the_formulas_in_plain_floats(name: str) -> None:
    for seed in range(5):
        new, old, advantages = _random(seed)
        got = _make(name)(_inputs(new.float(), old.float(), advantages.float())).loss
        triples = zip(new.tolist(), old.tolist(), advantages.tolist(), strict=True)
        want = [_plain(name, *triple) for triple in triples]
        assert got.tolist() == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("name", ["vanilla", "sapo", "dro", "reinforce"])
def test_gradients_equal_finite_differences(name: str) -> None:
    new, old, advantages = _random(7)
    new.requires_grad_()
    _make(name)(_inputs(new, old, advantages)).loss.sum().backward()
    step = 1e-6
    up, down = (
        _make(name)(_inputs(new.detach() + sign * step, old, advantages)).loss for sign in (1, -1)
    )
    assert new.grad is not None
    torch.testing.assert_close(new.grad, (up - down) / (2 * step), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("difference", [-500.0, -30.0, 30.0, 500.0])
def test_far_from_the_old_policy_values_and_gradients_are_finite(
    name: str, difference: float
) -> None:
    new = torch.tensor([difference, difference], requires_grad=True)
    out = _make(name)(_inputs(new, torch.zeros(2), torch.tensor([1.0, -1.0])))
    out.loss.sum().backward()
    assert new.grad is not None and bool(new.grad.isfinite().all())
    assert bool(out.loss.isfinite().all()) and bool(out.ratio.isfinite().all())


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("vanilla", {"clip_low": 1.5}, r"clip_low=1\.5.*Vanilla.*at most 1"),
        ("vanilla", {"clip_low": 0.0}, r"clip_low=0\.0"),
        ("vanilla", {"clip_high": -0.1}, r"clip_high=-0\.1.*above 0"),
        ("vanilla", {"clip_high": float("nan")}, "clip_high=nan"),
        ("vanilla", {"dual_clip": 1.0}, r"dual_clip=1\.0.*above 1"),
        ("vanilla", {"clip": 0.2}, "did you mean 'clip_"),
        ("cispo", {"clip_high": 0.0}, "clip_high"),
        ("gspo", {"clip_low": 2.0}, r"clip_low=2\.0.*GSPO"),
        ("geo_mean", {"clip_high": 0.0}, r"clip_high=0\.0.*GeoMean"),
        ("sapo", {"tau_neg": 0.0}, r"tau_neg=0\.0.*1\.05"),
        ("dro", {}, "DRO needs beta"),
        ("dro", {"beta": 0.0}, r"beta=0\.0.*above 0"),
        ("clip_cov", {"share": 2.0}, r"share=2\.0.*at most 1"),
        ("clip_cov", {"cov_low": 6.0}, r"cov_low=6\.0.*cov_high=5\.0"),
        ("kl_cov", {"kl_coef": -1.0}, r"kl_coef=-1\.0"),
        ("dppo_tv", {"tv_high": 1.5}, r"tv_high=1\.5"),
        ("dppo_tv", {"max_ratio": 0.5}, r"max_ratio=0\.5"),
        ("dppo_kl", {"kl_low": 0.0}, r"kl_low=0\.0.*nats"),
        ("reinforce", {"clip_low": 0.2}, "takes no such argument"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    name: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make_loss(name, kwargs)
    assert "algo.loss_kwargs" in str(error.value)


def test_every_loss_of_the_reference_is_there_and_says_whether_it_uses_a_ratio() -> None:
    found = {name: _make(name).uses_ratio for name in LOSSES.names()}
    without = {"dro", "reinforce", "gpg"}
    with_ratio = {
        "vanilla", "cispo", "sapo", "gspo", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl",
    }  # fmt: skip
    assert found == {name: name in with_ratio for name in without | with_ratio}
