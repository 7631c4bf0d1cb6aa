"""Rollout correction: weights, rejection and metrics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algo.config import (
    REJECT_STATISTICS,
    CorrectionConfig,
    CorrectionWeight,
    RejectConfig,
)
from agentrl.algo.correction import Correction, correct
from tests.parity.bridge import Ragged, ragged
from tests.parity.record import SEEDS, compare
from tests.parity.verl_side import correction as verl

METRICS = ("kl", "k3_kl", "chi2_token")
"""Means over tokens, which rows without any cannot change."""
ROW_METRICS = ("training_ppl", "rollout_ppl", "log_ppl_diff", "ppl_ratio", "chi2_seq")
"""Means over rows, in which verl counts those without a token."""


def ours(step: Ragged, **settings: Any) -> Correction:
    return correct(
        step.flat(step.fields["old_logprobs"]),
        step.flat(step.fields["rollout_logprobs"]),
        step.flat(step.mask),
        step.session_of_token,
        CorrectionConfig(**settings),
    )


def theirs(step: Ragged, **settings: Any) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    weights, mask, metrics = verl.compute_rollout_correction_and_rejection_mask(
        old_log_prob=step.fields["old_logprobs"],
        rollout_log_prob=step.fields["rollout_logprobs"],
        response_mask=step.maskf,
        **settings,
    )
    weights = None if weights is None else step.flat(weights.batch["rollout_is_weights"])
    return (
        weights,
        step.flat(mask),
        {k.removeprefix("rollout_corr/"): v for k, v in metrics.items()},
    )


BOUNDS = {"truncated": (1.1, None, 1.1), "icepop": (1.3, 0.75, "0.75_1.3")}


@pytest.mark.parametrize("normalize", [False, True], ids=["", "normalized"])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("weight", [CorrectionWeight.token, CorrectionWeight.sequence])
def test_weights(weight: CorrectionWeight, bounds: str, normalize: bool) -> None:
    upper, lower, threshold = BOUNDS[bounds]
    settings = {
        "rollout_is": str(weight),
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": normalize,
    }
    name = f"is {weight} {bounds}" + (" normalized" if normalize else "")
    for seed in SEEDS:
        step = ragged(seed)
        got = ours(step, weight=weight, upper=upper, lower=lower, normalize=normalize)
        assert got.weights is not None
        if not got.weights.any():  # Where we differ: verl divides by zero, see the last test
            with pytest.raises(ZeroDivisionError):
                theirs(step, **settings)
            continue
        want, _, metrics = theirs(step, **settings)
        assert want is not None
        # Variances, not deviations: verl's float32 E[w^2] - E[w]^2 has no digits left below 1e-7.
        mine, verls = of_both(got, metrics, "is_mean", "is_std", "is_eff_sample_size")
        mine[1], verls[1] = mine[1] ** 2, verls[1] ** 2
        compare(name, torch.cat([got.weights, mine]), torch.cat([want, verls]))


def of_both(got: Correction, want: dict[str, float], *names: str) -> tuple[Tensor, Tensor]:
    """Metrics of ours and of verl under our names."""
    mine = [got.metrics[f"correction/{name}"] for name in names]
    spelt = [f"rollout_{name}" if name[:3] in ("is_", "rs_") else name for name in names]
    return torch.tensor(mine), torch.tensor([want[name] for name in spelt])


def test_fractions_out_of_bounds() -> None:
    for seed in SEEDS:
        step = ragged(seed, empty=False)
        for weight in (CorrectionWeight.token, CorrectionWeight.sequence):
            got = ours(step, weight=weight, upper=1.1)
            _, _, want = theirs(step, rollout_is=str(weight), rollout_is_threshold=1.1)
            sides = ("is_ratio_fraction_high", "is_ratio_fraction_low")
            compare(f"is {weight}: out of bounds", *of_both(got, want, *sides))


def test_extremes_are_those_before_the_bounds() -> None:
    """Where we differ: verl's extremes of token weights are those after the cut.

    Its maximum then says the threshold for ever; ours says how far the policies are apart, at every
    level, as verl's does for sequences.
    """
    for seed in SEEDS:
        step = ragged(seed, empty=False)
        got = ours(step, weight=CorrectionWeight.sequence, upper=1.1)
        _, _, want = theirs(step, rollout_is="sequence", rollout_is_threshold=1.1)
        compare("is sequence: max, min", *of_both(got, want, "is_max", "is_min"))
        got = ours(step, weight=CorrectionWeight.token, upper=1.1)
        _, _, want = theirs(step, rollout_is="token", rollout_is_threshold=1.1)
        raw, after = of_both(got, want, "is_max", "is_min")
        compare("is token: max, min (verl's after the cut)", raw.clamp(max=1.1), after)


def test_geometric_weights_are_those_that_verl_rejects_by() -> None:
    """verl 0.9.1 has no weights of this kind; its statistic ``seq_mean_k1`` is their -log."""
    for seed in SEEDS:
        step = ragged(seed)
        got = ours(step, weight=CorrectionWeight.geometric, upper=100.0)
        _, _, want = theirs(step, rollout_rs="seq_mean_k1", rollout_rs_threshold="0.01_100")
        assert got.weights is not None
        k1 = -got.weights[got.keep].log()
        mine = torch.stack([k1.max(), k1.min(), k1.mean()])
        names = ("max", "min", "mean")
        theirs_k1 = torch.tensor([want[f"rollout_rs_seq_mean_k1_{name}"] for name in names])
        compare("is geometric (verl's statistic)", mine, theirs_k1)


BOUNDS_OF_RULES = {
    "token_k1": (1.1, 0.8),
    "seq_mean_k1": (1.05, None),
    "token_k2": (0.01, None),
    "token_k3": (0.01, None),
    "seq_sum_k1": (1.4, 0.6),
    "seq_sum_k2": (0.1, None),
    "seq_sum_k3": (0.1, None),
    "seq_mean_k2": (0.01, None),
    "seq_mean_k3": (0.01, None),
    "seq_max_k2": (0.04, None),
    "seq_max_k3": (0.04, None),
}


@pytest.mark.parametrize("statistic", REJECT_STATISTICS)
def test_rejection(statistic: str) -> None:
    high, low = BOUNDS_OF_RULES[statistic]
    rejected = 0
    for seed in SEEDS:
        step = ragged(seed)
        got = ours(step, reject=[RejectConfig(statistic=statistic, high=high, low=low)])
        threshold = str(high) if low is None else f"{low}_{high}"
        _, want, metrics = theirs(step, rollout_rs=statistic, rollout_rs_threshold=threshold)
        mine, verls = of_both(got, metrics, f"rs_{statistic}_masked_fraction")
        compare(f"rs {statistic}", torch.cat([got.keep, mine]), torch.cat([want, verls]))
        rejected += 0 < int(got.keep.sum()) < int(step.mask.sum())
    assert rejected > len(SEEDS) // 4, "bounds that reject nothing would prove nothing"


def test_rules_in_a_chain() -> None:
    for seed in SEEDS:
        step = ragged(seed)
        rules = [
            RejectConfig(statistic="token_k1", low=0.8, high=1.3),
            RejectConfig(statistic="seq_mean_k3", high=0.012),
        ]
        got = ours(step, reject=rules)
        _, want, metrics = theirs(
            step, rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.8_1.3,0.012"
        )
        mine, verls = of_both(got, metrics, "rs_masked_fraction")
        compare("rs chain of two", torch.cat([got.keep, mine]), torch.cat([want, verls]))


def test_metrics_of_the_mismatch() -> None:
    for seed in SEEDS:
        step = ragged(seed)
        compare("mismatch, over tokens", *of_both(ours(step), theirs(step)[2], *METRICS))
        step = ragged(seed, empty=False)
        compare("mismatch, over rows", *of_both(ours(step), theirs(step)[2], *ROW_METRICS))


def test_rows_without_a_token_do_not_count_in_means_over_rows() -> None:
    """Where we differ: verl gives a row of no sampled token log-probability 0 and averages it in.

    Its perplexities then fall with the number of empty rows, whatever the policies do.
    """
    seen = 0
    for seed in SEEDS:
        step = ragged(seed)
        share = 1 - float(step.empty.float().mean())
        seen += share < 1
        got, want = of_both(ours(step), theirs(step)[2], *ROW_METRICS)
        of_empty = torch.tensor(
            [float(name in ("training_ppl", "rollout_ppl", "ppl_ratio")) for name in ROW_METRICS]
        )
        mixed = share * got + (1 - share) * of_empty
        compare("mismatch, over rows (verl counts empty ones)", mixed, want)
    assert seen > 20


def test_normalization_after_rejection_uses_what_is_left() -> None:
    """Where we differ: verl divides by the mean over tokens that it has just rejected.

    A stale denominator: verl's weights that train do not average 1. Ours do.
    """
    apart = 0
    for seed in SEEDS:
        step = ragged(seed)
        rule = RejectConfig(statistic="token_k1", low=0.97, high=3.0)
        got = ours(step, weight=CorrectionWeight.token, upper=2.0, normalize=True, reject=[rule])
        want, mask, _ = theirs(
            step,
            rollout_is="token",
            rollout_is_threshold=2.0,
            rollout_is_batch_normalize=True,
            rollout_rs="token_k1",
            rollout_rs_threshold="0.97_3.0",
        )
        assert got.weights is not None
        assert want is not None
        assert torch.equal(got.keep.float(), mask)
        if not bool(got.keep.any()):
            continue
        trained = want[got.keep]
        rescaled = trained / trained.mean()
        compare("is normalized after rs (verl rescaled)", got.weights[got.keep], rescaled)
        apart += abs(float(trained.mean()) - 1) > 0.01
    assert apart > len(SEEDS) // 2, "verl's stale mean should show"


def test_nothing_left_is_not_an_error() -> None:
    """Where we differ: verl refuses a batch without a sampled token and divides by zero when all
    weights are out of bounds. A step in which everything is rejected is a step without an update,
    not a crash."""
    step = ragged(0)
    far = {"rollout_is": "token", "rollout_is_threshold": "50_60"}
    with pytest.raises(ZeroDivisionError):
        theirs(step, **far)
    got = ours(step, weight=CorrectionWeight.token, upper=60.0, lower=50.0, normalize=True)
    assert got.weights is not None
    assert not got.weights.any()
    with pytest.raises(ValueError, match="at least one valid token"):
        verl.compute_rollout_correction_and_rejection_mask(
            old_log_prob=step.fields["old_logprobs"],
            rollout_log_prob=step.fields["rollout_logprobs"],
            response_mask=torch.zeros_like(step.maskf),
        )
    none = correct(
        step.flat(step.fields["old_logprobs"]),
        step.flat(step.fields["rollout_logprobs"]),
        torch.zeros(int(step.length.sum()), dtype=torch.bool),
        step.session_of_token,
        CorrectionConfig(weight=CorrectionWeight.sequence, normalize=True),
    )
    assert not none.keep.any()
    assert all(math.isfinite(value) for value in none.metrics.values())
