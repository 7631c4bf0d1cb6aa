"""KL estimates and their gradients, the adaptive controller, the value loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.kl import KL_KINDS, KLController, kl_estimate
from agentrl.algo.value import ValueLoss
from tests.parity.bridge import ragged
from tests.parity.our_side import NORM_TOKENS
from tests.parity.record import SEEDS, compare
from tests.parity.test_aggregate import MODES
from tests.parity.verl_side import core

OLD_NAMES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}


def gradient_of(values: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(values.sum(), leaf)[0]


@pytest.mark.parametrize("kind", KL_KINDS)
def test_estimates(kind: str) -> None:
    for seed in SEEDS:
        step = ragged(seed)
        leaf = step.sampled(step.fields["logprobs"]).requires_grad_()
        ref = step.sampled(step.fields["ref_logprobs"]).clone()
        ref[::7] -= 30.0  # beyond the clamps of k3, whose gradient is 0 there on both sides
        ref[1::11] += 30.0
        got, want = kl_estimate(leaf, ref, kind), core.kl_penalty(leaf, ref, kind)
        compare(f"kl {kind}", got, want)
        compare(f"kl {kind}: gradient", gradient_of(got, leaf), gradient_of(want, leaf))
        base = kind.rstrip("+")
        by_old_name = core.kl_penalty(leaf, ref, OLD_NAMES.get(base, base) + kind[len(base) :])
        compare(f"kl {kind} by its older name", got, by_old_name)


def test_kl_taken_from_rewards() -> None:
    for seed in SEEDS:
        step = ragged(seed)
        beta = 0.05
        old, ref = step.fields["old_logprobs"], step.fields["ref_logprobs"]
        want = core.compute_rewards(step.rewards, old, ref, beta)
        got = step.rewards - beta * kl_estimate(old, ref, "k1")
        compare("kl in reward", step.sampled(got), step.sampled(want))


def test_adaptive_controller() -> None:
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        target, horizon = float(rng.uniform(0.01, 0.2)), 1000
        ours = KLController(0.05, target=target, horizon=horizon)
        theirs = core.AdaptiveKLController(0.05, target, horizon)
        for _ in range(30):
            kl, num = float(rng.uniform(0, 0.4)), int(rng.integers(1, 500))
            ours.update(kl, num)
            theirs.update(kl, num)
        compare("kl adaptive coefficient", ours.value, float(theirs.value))


def test_the_adaptive_coefficient_cannot_turn_negative() -> None:
    """Where we differ: more sessions than five times the horizon turn verl's coefficient negative,
    a reward for leaving the reference. Ours count as one horizon at most."""
    ours = KLController(0.05, target=0.1, horizon=100)
    theirs = core.AdaptiveKLController(0.05, 0.1, 100)
    ours.update(0.0, 1000)
    theirs.update(0.0, 1000)
    assert float(theirs.value) < 0
    assert ours.value == pytest.approx(0.05 * 0.8)


@pytest.mark.parametrize("clip", [0.5, 0.1])
def test_value_loss(clip: float) -> None:
    for seed in SEEDS:
        step = ragged(seed)
        values, targets = step.fields["values"], step.fields["advantages"]
        flat_mask = step.flat(step.mask)
        totals = denominators(flat_mask, step.session_of_token)
        for mode in MODES:
            leaf = step.fields["new_values"].clone().requires_grad_()
            want, clipfrac = core.compute_value_loss(
                leaf,
                targets,
                values,
                step.maskf,
                clip,
                loss_agg_mode=mode,
                loss_scale_factor=NORM_TOKENS,
            )
            (gradient,) = torch.autograd.grad(want, leaf)
            batch = step.batch(values=values, value_targets=targets)
            batch.tokens["loss_weights"] = token_weights(
                flat_mask, step.session_of_token, None, mode, totals, norm_tokens=NORM_TOKENS
            )
            mine = step.flat(step.fields["new_values"]).requires_grad_()
            loss = ValueLoss(num_tokens=totals.num_tokens, clip=clip)
            got, metrics = loss({"values": mine}, batch)
            (my_gradient,) = torch.autograd.grad(got, mine)
            compare(f"value loss, {mode}, clip {clip}", got, want)
            compare(f"value loss, {mode}, clip {clip}: gradient", my_gradient, step.flat(gradient))
            assert float(metrics["vf_clipfrac"]) == pytest.approx(float(clipfrac), abs=1e-6)
