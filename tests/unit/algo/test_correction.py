from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algo.config import (
    REJECT_STATISTICS,
    CorrectionConfig,
    CorrectionWeight,
    RejectConfig,
    correction_problems,
)
from agentrl.algo.correction import Correction, correct
from agentrl.errors import TrainingError

# Session 0 has two rows with an observation (masked) between its three sampled tokens, session 1
# one token, session 2 nothing that is trained.
SESSION = torch.tensor([0, 0, 0, 0, 1, 2])
MASK = torch.tensor([True, False, True, True, True, False])
ENGINE = torch.tensor([-1.0, 0.0, -2.0, -1.5, -0.5, -3.0])
LOG_RATIO = torch.tensor([0.0, 9.0, math.log(4.0), math.log(0.5), math.log(0.25), 9.0])
RATIOS = {0: 1.0, 2: 4.0, 3: 0.5, 4: 0.25}  # token -> trainer's over engine's probability


def run(**config: object) -> Correction:
    return correct(ENGINE + LOG_RATIO, ENGINE, MASK, SESSION, CorrectionConfig(**config))  # type: ignore[arg-type]


def weights_of(**config: object) -> dict[int, float]:
    weights = run(**config).weights
    assert weights is not None
    assert weights[~MASK].tolist() == [0.0, 0.0], "a token that is not trained on has no weight"
    return {int(i): float(weights[i]) for i in MASK.nonzero()}


def kept(*rules: RejectConfig) -> set[int]:
    return {int(i) for i in run(reject=list(rules)).keep.nonzero()}


def test_token_weights_are_cut_from_above_only() -> None:
    want = {0: 1.0, 2: 2.0, 3: 0.5, 4: 0.25}
    assert weights_of(weight=CorrectionWeight.token, upper=2.0) == pytest.approx(want)


def test_a_lower_bound_masks_on_both_sides() -> None:
    got = weights_of(weight=CorrectionWeight.token, upper=2.0, lower=0.3)
    assert got == pytest.approx({0: 1.0, 2: 0.0, 3: 0.5, 4: 0.0})


def test_sequence_weight_is_the_product_over_all_rows_of_the_session() -> None:
    got = weights_of(weight=CorrectionWeight.sequence, upper=10.0)
    assert got == pytest.approx({0: 2.0, 2: 2.0, 3: 2.0, 4: 0.25})


def test_geometric_weight_is_the_mean_ratio_of_the_session() -> None:
    got = weights_of(weight=CorrectionWeight.geometric, upper=10.0)
    root = 2.0 ** (1 / 3)
    assert got == pytest.approx({0: root, 2: root, 3: root, 4: 0.25})


def test_token_weights_normalize_to_mean_one_over_tokens() -> None:
    got = weights_of(weight=CorrectionWeight.token, upper=10.0, normalize=True)
    mean = sum(RATIOS.values()) / 4
    assert got == pytest.approx({i: ratio / mean for i, ratio in RATIOS.items()})


def test_sequence_weights_normalize_to_mean_one_over_sessions() -> None:
    got = weights_of(weight=CorrectionWeight.sequence, upper=10.0, normalize=True)
    assert (got[0] + got[4]) / 2 == pytest.approx(1.0)  # session 0 counts once, not three times


def test_normalization_ignores_what_was_rejected() -> None:
    got = weights_of(
        weight=CorrectionWeight.token,
        upper=10.0,
        normalize=True,
        reject=[RejectConfig(statistic="token_k1", low=0.3, high=100.0)],
    )
    assert got[2] == 0.0, "ratio 4 of trainer over engine is 0.25 of engine over trainer: rejected"
    assert (got[0] + got[3] + got[4]) / 3 == pytest.approx(1.0)


def test_log_ratios_are_clamped() -> None:
    logprobs = torch.tensor([-500.0, 0.0])
    found = correct(
        logprobs,
        logprobs.flip(0),
        torch.tensor([True, True]),
        torch.tensor([0, 1]),
        CorrectionConfig(weight=CorrectionWeight.token, upper=1e12),
    )
    assert found.weights is not None
    assert found.weights.tolist() == pytest.approx([math.exp(-20), math.exp(20)], rel=1e-6)


@pytest.mark.parametrize(
    ("rule", "want"),
    [
        # k1: bounds of the engine's over the trainer's probability: 1, 1/4, 2, 4
        (RejectConfig(statistic="token_k1", high=2.5), {0, 3}),  # low is 1/2.5
        (RejectConfig(statistic="token_k1", low=0.2, high=2.5), {0, 2, 3}),
        (RejectConfig(statistic="token_k2", high=0.5 * math.log(3) ** 2), {0, 3}),
        # r - 1 - log r: 0, 1.61, 0.19, 0.64
        (RejectConfig(statistic="token_k3", high=0.7), {0, 3, 4}),
        (RejectConfig(statistic="token_k3", high=0.5), {0, 3}),
        # sums of k1: -log 2, log 4
        (RejectConfig(statistic="seq_sum_k1", high=3.0), {0, 2, 3}),
        (RejectConfig(statistic="seq_sum_k1", low=0.6, high=5.0), {4}),
        (RejectConfig(statistic="seq_sum_k2", high=1.0), {4}),  # 1.20, 0.96
        (RejectConfig(statistic="seq_sum_k3", high=1.0), {4}),  # 1.81, 0.64
        (RejectConfig(statistic="seq_mean_k1", high=1.5), {0, 2, 3}),  # 2^(-1/3), 4
        (RejectConfig(statistic="seq_mean_k2", high=0.5), {0, 2, 3}),  # 0.40, 0.96
        (RejectConfig(statistic="seq_mean_k3", high=0.62), {0, 2, 3}),  # 0.60, 0.64
        (RejectConfig(statistic="seq_max_k2", high=0.97), {0, 2, 3, 4}),  # 0.961 in both
        (RejectConfig(statistic="seq_max_k2", high=0.96), set()),
        (RejectConfig(statistic="seq_max_k3", high=1.0), {4}),  # 1.61, 0.64
    ],
)
def test_rejection_by_hand_worked_statistics(rule: RejectConfig, want: set[int]) -> None:
    assert kept(rule) == want


def test_every_rule_must_be_passed() -> None:
    rules = (
        RejectConfig(statistic="token_k3", high=0.7),
        RejectConfig(statistic="seq_sum_k1", high=3.0),
    )
    assert kept(*rules) == {0, 3}


def test_metrics_by_hand() -> None:
    got = run(
        weight=CorrectionWeight.token,
        upper=1.9,
        reject=[
            RejectConfig(statistic="token_k3", high=0.7),
            RejectConfig(statistic="seq_sum_k1", high=3.0),
        ],
    ).metrics
    applied = [1.0, 1.9, 0.5, 0.25]
    mean = sum(applied) / 4
    square = sum(w * w for w in applied) / 4
    k1 = [0.0, -math.log(4), math.log(2), math.log(4)]
    k3 = [math.exp(-k) - 1 + k for k in k1]
    trainer = [(1.0 + 2.0 + 1.5 - math.log(2)) / 3, 0.5 + math.log(4)]  # -log p by session
    engine = [4.5 / 3, 0.5]
    want = {
        "is_mean": mean,
        "is_std": math.sqrt(square - mean**2),
        "is_max": 4.0,
        "is_min": 0.25,
        "is_eff_sample_size": mean**2 / square,
        "is_ratio_fraction_high": 1 / 4,
        "is_ratio_fraction_low": 2 / 4,  # below 1/1.9
        "rs_token_k3_masked_fraction": 1 / 4,
        "rs_seq_sum_k1_masked_fraction": 1 / 4,
        "rs_masked_fraction": 2 / 4,
        "kl": sum(k1) / 4,
        "k3_kl": sum(k3) / 4,
        "training_ppl": sum(math.exp(x) for x in trainer) / 2,
        "rollout_ppl": sum(math.exp(x) for x in engine) / 2,
        "log_ppl_diff": (trainer[0] - engine[0] + trainer[1] - engine[1]) / 2,
        "ppl_ratio": (2 ** (-1 / 3) + 4) / 2,
        "chi2_token": (1 + 16 + 1 / 4 + 1 / 16) / 4 - 1,
        "chi2_seq": (4 + 1 / 16) / 2 - 1,
    }
    assert got == pytest.approx({f"correction/{k}": v for k, v in want.items()}, rel=1e-5)


def test_equal_policies_change_nothing() -> None:
    found = correct(
        ENGINE,
        ENGINE,
        MASK,
        SESSION,
        CorrectionConfig(
            weight=CorrectionWeight.sequence,
            normalize=True,
            reject=[RejectConfig(statistic=name, high=1.0001) for name in REJECT_STATISTICS],
        ),
    )
    assert found.weights is not None
    assert torch.equal(found.weights, MASK.float())
    assert torch.equal(found.keep, MASK)
    assert found.metrics["correction/is_eff_sample_size"] == 1.0
    assert found.metrics["correction/chi2_seq"] == 0.0
    assert found.metrics["correction/rs_masked_fraction"] == 0.0


def test_off_only_measures() -> None:
    found = run()
    assert found.weights is None
    assert torch.equal(found.keep, MASK)
    assert found.metrics["correction/ppl_ratio"] > 0
    assert not any("/is_" in name or "/rs_" in name for name in found.metrics)


ALL_REJECTED = RejectConfig(statistic="token_k1", low=1e6, high=1e7)


@pytest.mark.parametrize("weight", CorrectionWeight)
@pytest.mark.parametrize("normalize", [False, True])
def test_everything_rejected_gives_zeros_never_nan(
    weight: CorrectionWeight, normalize: bool
) -> None:
    for mask in (MASK, torch.zeros_like(MASK)):
        config = CorrectionConfig(weight=weight, normalize=normalize, reject=[ALL_REJECTED])
        found = correct(ENGINE + LOG_RATIO, ENGINE, mask, SESSION, config)
        assert not found.keep.any()
        assert found.weights is None or found.weights.tolist() == [0.0] * 6
        assert all(math.isfinite(value) for value in found.metrics.values())


def test_weights_all_out_of_bounds_stay_zero_when_normalized() -> None:
    config = {"weight": CorrectionWeight.token, "upper": 100.0, "lower": 50.0, "normalize": True}
    assert set(weights_of(**config).values()) == {0.0}
    assert run(**config).metrics["correction/is_eff_sample_size"] == 0.0


def test_weights_carry_no_gradient() -> None:
    trainer = (ENGINE + LOG_RATIO).requires_grad_()
    config = CorrectionConfig(weight=CorrectionWeight.sequence)
    weights = correct(trainer, ENGINE, MASK, SESSION, config).weights
    assert weights is not None
    assert not weights.requires_grad


def test_a_log_probability_that_is_not_finite_is_refused_where_it_is_trained_on() -> None:
    trainer = (ENGINE + LOG_RATIO).clone()
    trainer[1] = torch.nan  # an observation: nobody asks
    correct(trainer, ENGINE, MASK, SESSION, CorrectionConfig())
    trainer[3] = torch.nan
    with pytest.raises(TrainingError, match="1 of 4 log-probabilities of the trainer"):
        correct(trainer, ENGINE, MASK, SESSION, CorrectionConfig())


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = draw(st.integers(1, 30))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    engine = -torch.rand(size, generator=generator) * 3
    trainer = engine + torch.randn(size, generator=generator) * draw(st.sampled_from([0.01, 1, 30]))
    mask = torch.rand(size, generator=generator) < draw(st.sampled_from([0.1, 0.7, 1.0]))
    session = torch.randint(0, draw(st.integers(1, 6)), (size,), generator=generator)
    return trainer, engine, mask, session


configs = st.builds(
    CorrectionConfig,
    weight=st.sampled_from(CorrectionWeight),
    upper=st.floats(0.5, 5.0),
    lower=st.none() | st.floats(0.01, 0.5),
    normalize=st.booleans(),
    reject=st.lists(
        st.builds(
            RejectConfig, statistic=st.sampled_from(list(REJECT_STATISTICS)), high=st.floats(1, 3)
        ),
        max_size=3,
        unique_by=lambda rule: rule.statistic,
    ),
)


@settings(max_examples=150, deadline=None)
@given(batch=batches(), config=configs, seed=st.integers(0, 1000))
def test_order_of_tokens_and_names_of_sessions_do_not_matter(
    batch: tuple[Tensor, Tensor, Tensor, Tensor], config: CorrectionConfig, seed: int
) -> None:
    assert not list(correction_problems(config))
    before = correct(*batch, config)
    order = torch.randperm(len(batch[0]), generator=torch.Generator().manual_seed(seed))
    trainer, engine, mask, session = (field[order] for field in batch)
    after = correct(trainer, engine, mask, 3 * session + 2, config)
    assert torch.equal(after.keep, before.keep[order])
    assert not (before.keep & ~batch[2]).any(), "rejection never adds tokens"
    assert all(math.isfinite(value) for value in before.metrics.values())
    assert after.metrics == pytest.approx(before.metrics, rel=1e-6, abs=1e-9)
    if before.weights is not None and after.weights is not None:
        torch.testing.assert_close(after.weights, before.weights[order])
        assert not before.weights[~before.keep].any()
        if not config.normalize:
            assert float(before.weights.max()) <= config.upper * (1 + 1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CorrectionConfig(upper=0.0), "upper=0.0: must be above 0"),
        (CorrectionConfig(upper=2.0, lower=3.0), "at most upper=2.0"),
        (CorrectionConfig(reject=[RejectConfig(statistic="seq_max_k1", high=2)]), "token_k1"),
        (CorrectionConfig(reject=[RejectConfig(statistic="token_k2", high=-1)]), "above 0"),
        (CorrectionConfig(reject=[RejectConfig(statistic="token_k2", low=0.5, high=1)]), "no low"),
        (CorrectionConfig(reject=[RejectConfig(statistic="token_k1", high=0.5)]), "low=2 "),
        (CorrectionConfig(reject=[ALL_REJECTED, ALL_REJECTED]), "twice"),
    ],
)
def test_bounds_that_cannot_work_are_named(config: CorrectionConfig, message: str) -> None:
    problems = list(correction_problems(config))
    assert len(problems) == 1
    assert message in problems[0]


def test_sensible_bounds_are_accepted() -> None:
    rules = [RejectConfig(statistic=name, high=2.0) for name in REJECT_STATISTICS]
    assert list(correction_problems(CorrectionConfig(lower=0.5, reject=rules))) == []
