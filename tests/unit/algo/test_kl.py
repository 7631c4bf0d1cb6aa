from __future__ import annotations

import math

import pytest
import torch

from agentrl.algo.kl import KL_KINDS, kl_estimate


@pytest.mark.parametrize("d", [-1.5, -0.1, 0.0, 0.3, 2.0])
def test_estimates_equal_their_formulas(d: float) -> None:
    policy, reference = torch.tensor([d - 2.0]), torch.tensor([-2.0])
    want = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1}
    for kind in KL_KINDS:
        got = float(kl_estimate(policy, reference, kind))
        assert got == pytest.approx(want[kind], abs=1e-6), kind


@pytest.mark.parametrize("d", [-30.0, 30.0, -1000.0])
def test_k3_is_clamped_with_a_finite_gradient(d: float) -> None:
    policy = torch.tensor([d], requires_grad=True)
    value = kl_estimate(policy, torch.zeros(1), "k3").sum()
    value.backward()
    assert abs(float(value.detach())) <= 10.0
    assert policy.grad is not None and bool(policy.grad.isfinite().all())


def test_k3_averages_to_the_exact_kl() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = float((policy * (policy / reference).log()).sum())
    for kind in ("k1", "k3"):
        estimates = kl_estimate(policy.log(), reference.log(), kind)
        assert float((policy * estimates).sum()) == pytest.approx(exact, abs=1e-6), kind


def test_half_precision_inputs_are_computed_in_float32() -> None:
    got = kl_estimate(torch.tensor([-1.0]).bfloat16(), torch.tensor([-2.0]).bfloat16(), "k2")
    assert got.dtype == torch.float32


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "kl")
