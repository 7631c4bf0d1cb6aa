from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agentrl.algo.kl import KL_KINDS, KLController, kl_estimate
from agentrl.errors import CheckpointError, ConfigError, TrainingError


def _value_and_gradient(kind: str, d: float) -> tuple[float, float]:
    policy, reference = torch.tensor([d - 2.0], requires_grad=True), torch.tensor([-2.0])
    value = kl_estimate(policy, reference, kind)
    value.sum().backward()
    assert policy.grad is not None
    return float(value.detach()), float(policy.grad)


VALUES = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) + d - 1,
    "abs": abs,
}
SLOPES = {
    "k1": lambda d: 1.0,
    "k2": lambda d: d,
    "k3": lambda d: 1 - math.exp(-d),
    "abs": lambda d: math.copysign(1.0, d),
}


@pytest.mark.parametrize("d", [-1.5, -0.1, 0.3, 2.0])
@pytest.mark.parametrize("kind", KL_KINDS)
def test_values_and_gradients_equal_their_formulas(kind: str, d: float) -> None:
    value, gradient = _value_and_gradient(kind, d)
    base, straight_through = kind.rstrip("+"), kind.endswith("+")
    assert value == pytest.approx(VALUES[base](d), abs=1e-6)
    # A "+" takes the gradient of k2, which is d.
    assert gradient == pytest.approx(d if straight_through else SLOPES[base](d), abs=1e-5)


@pytest.mark.parametrize("d", [-1000.0, -30.0, 30.0, 1000.0])
@pytest.mark.parametrize("kind", KL_KINDS)
def test_far_apart_values_and_gradients_are_finite(kind: str, d: float) -> None:
    value, gradient = _value_and_gradient(kind, d)
    assert math.isfinite(value) and math.isfinite(gradient)
    if kind in ("k3", "k3+"):
        assert value == 10.0
    if kind.endswith("+"):
        assert gradient == pytest.approx(d)


def test_k1_and_k3_average_to_the_exact_kl_and_k2_has_its_gradient() -> None:
    logits = torch.tensor([0.5, 0.3, -0.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    policy = logits.softmax(0)
    exact = (policy * (policy / reference).log()).sum()
    (gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    weights = policy.detach()
    for kind in ("k1", "k3", "k1+", "k3+"):
        mean = (weights * kl_estimate(policy.log(), reference.log(), kind)).sum()
        assert float(mean.detach()) == pytest.approx(float(exact.detach()), abs=1e-6), kind
    for kind in ("k2", "k1+", "k3+", "abs+"):
        mean = (weights * kl_estimate(policy.log(), reference.log(), kind)).sum()
        (got,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(got, gradient, atol=1e-6, rtol=1e-5)


def test_half_precision_inputs_are_computed_in_float32() -> None:
    policy, reference = torch.tensor([-1.0078125]).bfloat16(), torch.tensor([-1.0]).bfloat16()
    got = kl_estimate(policy, reference, "k3")
    assert got.dtype == torch.float32
    # In bfloat16, e^0.0078 - 0.0078 - 1 would round to 0.
    assert float(got) == pytest.approx(0.5 * 0.0078125**2, rel=0.01)


def test_an_unknown_kind_lists_the_known_ones() -> None:
    for kind in ("kl", "k2+", ""):
        with pytest.raises(ValueError, match="k1, k2, k3, abs"):
            kl_estimate(torch.zeros(1), torch.zeros(1), kind)


def test_a_fixed_weight_stays() -> None:
    controller = KLController(0.01)
    controller.update(100.0, num_sessions=64)
    assert controller.value == 0.01


@pytest.mark.parametrize(
    ("kl", "num_sessions", "factor"),
    [
        (0.1, 100, 1.0),
        (0.11, 100, 1 + 0.1 * 0.1),  # 10 % above the target
        (0.095, 100, 1 - 0.05 * 0.1),
        (5.0, 100, 1 + 0.2 * 0.1),  # no more than 20 % are counted
        (0.0, 100, 1 - 0.2 * 0.1),
        (0.0, 100_000, 1 - 0.2),  # one step cannot react to more than the horizon
    ],
)
def test_an_adaptive_weight_steers_to_its_target(
    kl: float, num_sessions: int, factor: float
) -> None:
    controller = KLController(0.01, target=0.1, horizon=1000)
    controller.update(kl, num_sessions)
    assert controller.value == pytest.approx(0.01 * factor)


def test_an_adaptive_weight_survives_a_restart_and_a_fixed_one_is_the_configurations() -> None:
    controller = KLController(0.01, target=0.1, horizon=100)
    for _ in range(5):
        controller.update(1.0, 10)
    state = controller.state_dict()
    resumed = KLController(0.01, target=0.1, horizon=100)
    resumed.load_state_dict(state)
    assert resumed.value == controller.value != 0.01
    fixed = KLController(0.02)
    fixed.load_state_dict(state)
    assert fixed.value == 0.02


def test_an_adaptive_weight_begins_again_from_a_coefficient_that_was_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    controller = KLController(0.01, target=0.1, horizon=100)
    controller.update(1.0, 10)
    changed = KLController(0.5, target=0.1, horizon=100)
    changed.load_state_dict(controller.state_dict())
    assert changed.value == 0.5
    assert "algo.kl.coef was 0.01 and is now 0.5" in caplog.text


@pytest.mark.parametrize(
    "state", [{}, {"value": "much"}, {"value": float("nan")}, {"value": 0.1}, {"coef": 0.1}]
)
def test_a_damaged_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="KL coefficient"):
        KLController(0.01, target=0.1).load_state_dict(state)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"coef": -0.1}, r"coef=-0\.1"),
        ({"coef": float("nan")}, "coef=nan"),
        ({"coef": 0.1, "target": 0.0}, r"target=0\.0"),
        ({"coef": 0.0, "target": 0.1}, "stays 0"),
        ({"coef": 0.1, "target": 0.1, "horizon": 0}, "horizon=0"),
    ],
)
def test_settings_that_cannot_work_are_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KLController(**how)


def test_a_kl_that_is_not_finite_does_not_poison_the_weight() -> None:
    controller = KLController(0.01, target=0.1)
    with pytest.raises(TrainingError, match="nan"):
        controller.update(float("nan"), 10)
    assert controller.value == 0.01
