"""The algorithm of a step on a real, small training engine."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.algo.config import (
    AlgoConfig,
    CorrectionConfig,
    CorrectionWeight,
    GroupsConfig,
    KLConfig,
    KLPlace,
    OldLogprobs,
    RejectConfig,
)
from agentrl.algo.loss import make_loss
from agentrl.batch import Batch, RowView
from agentrl.dist.config import ActorConfig, Offload
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.testing.random_models import VOCAB, build
from agentrl.testing.sessions import make_group, make_session
from agentrl.train.assemble import TrainBatch, assemble
from agentrl.train.learner import Learner
from agentrl.types import Score, Trajectory, TrajectoryGroup

BUDGET = 10_000


class Engine(FSDPEngine):
    """Counts forward passes and keeps the batches and losses it was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.inferred: list[tuple[str, ...]] = []
        self.trained: list[tuple[Batch, Any]] = []

    def infer_batch(
        self,
        batch: Batch | RowView,
        *,
        tokens_per_micro_batch: int,
        fields: Sequence[str] = ("logprobs",),
    ) -> dict[str, Tensor]:
        self.inferred.append(tuple(fields))
        return super().infer_batch(
            batch, tokens_per_micro_batch=tokens_per_micro_batch, fields=fields
        )

    def train_mini_batch(
        self, batch: Batch | RowView, loss_fn: Any, **kwargs: Any
    ) -> dict[str, Any]:
        assert isinstance(batch, Batch)
        self.trained.append((batch, loss_fn))
        return super().train_mini_batch(batch, loss_fn, **kwargs)


def sampled_by(model: Any, session: Trajectory, seed: int, *, off: float = 0.0) -> Trajectory:
    """Give a session random tokens, and the log-probabilities of ``model`` plus ``off``."""
    generator = np.random.default_rng(seed)
    for segment in session.segments:
        segment.ids = generator.integers(0, VOCAB, len(segment.ids))
        ids = torch.from_numpy(segment.ids)
        with torch.no_grad():
            scores = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
        own = torch.cat([torch.zeros(1), scores.gather(1, ids[1:, None]).squeeze(1)]).numpy()
        segment.logprobs = np.where(segment.loss_mask, own + off, 0.0).astype(np.float32)
    return session


def groups_of(model: Any, *, off: float = 0.0) -> list[TrajectoryGroup]:
    masks = [[0, 0, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1, 0]]
    return [
        make_group(
            *(
                sampled_by(
                    model,
                    make_session(f"{g}-{i}", float(i == g), [masks[i % 2]], sample_index=i),
                    10 * g + i,
                    off=off,
                )
                for i in range(4)
            ),
            index=g,
        )
        for g in range(2)
    ]


def learner(model: Any, algo: AlgoConfig, **optimization: Any) -> tuple[Learner, Engine]:
    config = ActorConfig(
        **{"lr": 1e-3, "tokens_per_micro_batch": BUDGET, "updates_per_step": 1} | optimization
    )
    engine = Engine(copy.deepcopy(model), None, config, ranks=Ranks.single("cpu"))
    reference = (
        FSDPEngine(copy.deepcopy(model), None, config, ranks=Ranks.single("cpu"), trainable=False)
        if algo.kl.coef
        else None
    )
    made = Learner(
        engine,
        algo=algo,
        credit={"e": algo},
        token_loss=make_loss(algo.loss, algo.loss_kwargs),
        optimization=config,
        loss_agg_tokens=100,
        seed=0,
        reference=reference,
    )
    return made, engine


def prepared(model: Any, algo: AlgoConfig, *, off: float = 0.0) -> TrainBatch:
    return assemble(groups_of(model, off=off), {"e": algo})


@pytest.fixture(scope="module")
def model() -> Any:
    return build("qwen3")


def test_credit_from_rewards_alone_costs_no_forward_pass(model: Any) -> None:
    algo = AlgoConfig()
    made, engine = learner(model, algo)
    batch, metrics = made.assign_credit(prepared(model, algo))
    assert engine.inferred == []
    assert batch.batch is not None
    assert torch.equal(batch.batch.tokens["old_logprobs"], batch.batch.tokens["logprobs"])
    assert metrics["credit/advantage_mass/turn_1"] > 0
    updated = made.update(batch, 0)
    assert engine.inferred == []
    assert updated["actor/updates"] == 1
    assert updated["mismatch/logprob_abs_max"] < 1e-4
    assert updated["actor/entropy/turn_1"] > 0 and updated["actor/entropy/turn_2"] > 0


def test_the_decoupled_mode_takes_its_ratios_against_the_trainers_old_policy(model: Any) -> None:
    algo = AlgoConfig(old_logprobs=OldLogprobs.recompute)
    made, engine = learner(model, algo)
    batch, _ = made.assign_credit(prepared(model, algo, off=-0.3))
    assert engine.inferred == [("logprobs",)]
    assert batch.batch is not None
    mask = batch.batch.tokens["loss_mask"]
    distance = batch.batch.tokens["old_logprobs"][mask] - batch.batch.tokens["logprobs"][mask]
    torch.testing.assert_close(distance, torch.full_like(distance, 0.3), atol=1e-4, rtol=0)
    assert made.update(batch, 0)["actor/kl"] < 1e-6  # the first update is on the old policy


def test_an_importance_weight_multiplies_the_decoupled_loss(model: Any) -> None:
    plain = AlgoConfig(old_logprobs=OldLogprobs.recompute)
    weighed = AlgoConfig(
        old_logprobs=OldLogprobs.recompute,
        correction=CorrectionConfig(weight=CorrectionWeight.token, upper=5.0),
    )
    losses = []
    for algo in (plain, weighed):
        made, engine = learner(model, algo)
        batch, metrics = made.assign_credit(prepared(model, algo, off=-0.5))
        losses.append(made.update(batch, 0)["actor/loss"])
    assert metrics["correction/is_mean"] == pytest.approx(np.exp(0.5), rel=1e-3)
    assert losses[1] == pytest.approx(losses[0] * np.exp(0.5), rel=1e-3, abs=1e-6)


def test_rejected_tokens_leave_the_loss_and_its_denominators(model: Any) -> None:
    rule = RejectConfig(statistic="token_k2", high=0.01)
    algo = AlgoConfig(
        old_logprobs=OldLogprobs.recompute, correction=CorrectionConfig(reject=[rule])
    )
    groups = groups_of(model)
    off = groups[0].trajectories[1].segments[0]  # two of its tokens disagree
    off.logprobs[[2, 4]] -= 1.0
    made, engine = learner(model, algo)
    batch, metrics = made.assign_credit(assemble(groups, {"e": algo}))
    made.update(batch, 0)
    trained, loss = engine.trained[0]
    all_sampled = sum(t.num_sampled_tokens for g in groups for t in g.trajectories)
    assert int(trained.tokens["loss_mask"].sum()) == loss.num_tokens == all_sampled - 2
    assert float(trained.tokens["loss_weights"].sum()) == pytest.approx(1.0)
    assert metrics["correction/rs_token_k2_masked_fraction"] == pytest.approx(2 / all_sampled)
    # Their session still counts in the group's mean: the reward does not vanish with its tokens.
    kept = {t.id: a for t, a in zip(batch.sessions, batch.advantages.values(), strict=True)}
    assert len(kept) == 8 and kept["0-1"][0][2] != 0


def test_rows_of_rejected_tokens_alone_are_left_out_and_a_step_of_them_is_empty(model: Any) -> None:
    algo = AlgoConfig(
        old_logprobs=OldLogprobs.recompute,
        correction=CorrectionConfig(reject=[RejectConfig(statistic="seq_max_k2", high=0.01)]),
    )
    groups = groups_of(model)
    segment = groups[0].trajectories[1].segments[0]
    segment.logprobs[segment.loss_mask] -= 1.0
    made, _ = learner(model, algo)
    batch, _ = made.assign_credit(assemble(groups, {"e": algo}))
    assert "0-1" not in batch.trained_ids and len(batch.trained_ids) == 7
    assert batch.batch is not None and 1 not in batch.batch.rows["session"]
    assert batch.advantages["0-1"][0].any()  # for the record it has its credit
    none, _ = made.assign_credit(prepared(model, algo, off=-1.0))
    assert none.is_empty and not none.trained_ids
    assert "algo.correction rejected every token" in none.why_empty


def test_a_mini_batch_of_which_everything_is_rejected_is_no_update(model: Any) -> None:
    """Where the correction is against the engine itself, it is known as late as that."""
    algo = AlgoConfig(
        correction=CorrectionConfig(reject=[RejectConfig(statistic="token_k2", high=0.01)])
    )
    made, engine = learner(model, algo)
    batch, _ = made.assign_credit(prepared(model, algo, off=-1.0))
    metrics = made.update(batch, 0)
    assert metrics["actor/updates"] == 0 and engine.num_updates == 0
    assert metrics["correction/rs_masked_fraction"] == 1.0


def test_without_a_ratio_the_engine_itself_is_the_old_policy_and_weights_apply(model: Any) -> None:
    algo = AlgoConfig(
        loss="reinforce", correction=CorrectionConfig(weight=CorrectionWeight.token, upper=9.0)
    )
    made, engine = learner(model, algo)
    batch, _ = made.assign_credit(prepared(model, algo, off=-0.5))
    metrics = made.update(batch, 0)
    trained, _ = engine.trained[0]
    weights = trained.tokens["is_weights"][trained.tokens["loss_mask"]]
    torch.testing.assert_close(
        weights, torch.full_like(weights, float(np.exp(0.5))), atol=1e-3, rtol=0
    )
    assert engine.inferred == [("logprobs",)]
    assert metrics["correction/is_mean"] == pytest.approx(np.exp(0.5), rel=1e-3)


def test_a_kl_in_the_reward_moves_advantages_and_one_in_the_loss_does_not(model: Any) -> None:
    def advantages(where: KLPlace, coef: float) -> Tensor:
        algo = AlgoConfig(
            advantage="reinforce_plus_plus",
            kl=KLConfig(coef=coef, where=where, kind="k1"),
            groups=GroupsConfig(drop_zero_advantage=False),
        )
        made, engine = learner(model, algo)
        if made.reference is not None:  # a reference that differs from the policy
            with torch.no_grad():
                for parameter in made.reference.model.parameters():  # type: ignore[attr-defined]
                    parameter.add_(0.02)
        batch, metrics = made.assign_credit(prepared(model, algo))
        assert batch.batch is not None
        assert ("credit/ref_kl" in metrics) == (where is KLPlace.reward)
        metrics |= made.update(batch, 0)
        assert metrics["actor/kl_coef"] == coef
        assert ("actor/ref_kl" in metrics) == (where is KLPlace.loss)
        return batch.batch.tokens["advantages"]

    in_loss = advantages(KLPlace.loss, 0.5)
    in_reward = advantages(KLPlace.reward, 0.5)
    assert float((in_loss - in_reward).abs().max()) > 1e-3


def test_the_reference_leaves_the_device_once_it_has_scored(model: Any) -> None:
    algo = AlgoConfig(kl=KLConfig(coef=0.1))
    made, _ = learner(model, algo, offload=Offload.all)
    made.assign_credit(prepared(model, algo))
    weights = list(made.reference.model.parameters())  # type: ignore[union-attr]
    assert all(value.untyped_storage().nbytes() == 0 for value in weights)


@pytest.mark.parametrize("kind", ["k1", "k3", "abs"])
def test_the_rounding_of_the_engine_is_no_distance_to_the_reference(model: Any, kind: str) -> None:
    """The first step: the policy is the reference, all rewards are equal, so nothing is learned."""
    algo = AlgoConfig(
        advantage="reinforce_plus_plus",
        kl=KLConfig(coef=1e-3, kind=kind, where=KLPlace.reward),
    )
    for moved in (False, True):
        groups = groups_of(model, off=1e-3)
        for member in (member for group in groups for member in group.trajectories):
            assert member.score is not None
            member.score = dataclasses.replace(member.score, reward=0.0)
        made, engine = learner(model, algo)
        if moved:
            with torch.no_grad():
                for parameter in engine.model.parameters():
                    parameter.add_(0.02)
        batch, metrics = made.assign_credit(assemble(groups, made.credit))
        assert batch.is_empty == (not moved)
        assert (metrics["credit/ref_kl"] == 0) == (not moved)


@pytest.mark.parametrize("where", list(KLPlace))
def test_an_adaptive_coefficient_is_part_of_the_state(model: Any, where: KLPlace) -> None:
    algo = AlgoConfig(kl=KLConfig(coef=0.1, target=1e-3, horizon=8, where=where))
    made, _ = learner(model, algo)
    batch, metrics = made.assign_credit(prepared(model, algo))
    metrics |= made.update(batch, 0)  # the policy equals its reference, so the weight falls
    assert metrics["actor/kl_coef"] == 0.1  # what the step was made with
    assert made.kl.value == pytest.approx(0.08)
    again, _ = learner(model, algo)
    again.load_state_dict(made.state_dict())
    assert again.kl.value == made.kl.value


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_a_loss_that_chooses_tokens_does_so_over_the_mini_batch(model: Any, name: str) -> None:
    norms, chosen = [], []
    for budget in (BUDGET, 12):
        algo = AlgoConfig(loss=name)
        made, engine = learner(model, algo, tokens_per_micro_batch=budget)
        batch, _ = made.assign_credit(prepared(model, algo))
        norms.append(made.update(batch, 0)["actor/grad_norm"])
        trained, loss = engine.trained[0]
        assert engine.inferred == [("logprobs",)] and loss.extra
        chosen.append([trained.tokens[field] for field in loss.extra])
    for one, other in zip(*chosen, strict=True):
        assert torch.equal(one, other)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_an_estimator_of_token_baselines_is_fed_with_squared_probabilities(model: Any) -> None:
    algo = AlgoConfig(advantage="optimal_token_baseline")
    made, engine = learner(model, algo)
    batch, _ = made.assign_credit(prepared(model, algo))
    assert engine.inferred == [("logprobs", "sum_pi_squared")]
    assert batch.batch is not None
    mask = batch.batch.tokens["loss_mask"]
    squares = batch.batch.tokens["sum_pi_squared"][mask]
    assert bool((squares > 1 / VOCAB).all()) and bool((squares <= 1).all())


def test_a_step_without_signal_is_empty_and_says_why(model: Any) -> None:
    algo = AlgoConfig()
    made, engine = learner(model, algo)
    flat = make_group(make_session("a", 1.0), make_session("b", 1.0))
    batch, _ = made.assign_credit(assemble([flat], {"e": algo}))
    assert batch.is_empty and "1 of 1 groups" in batch.why_empty
    nothing, _ = made.assign_credit(assemble([], {"e": algo}))
    assert nothing.is_empty


def test_the_trainers_logprobs_of_the_first_mini_batch_come_with_the_update(model: Any) -> None:
    algo = AlgoConfig()
    made, engine = learner(model, algo, updates_per_step=2)
    made.measure_mismatch(made.assign_credit(prepared(model, algo))[0], 0)  # the first step
    batch, _ = made.assign_credit(prepared(model, algo, off=-0.25))
    engine.inferred.clear()
    assert made.measure_mismatch(batch, 0) == {}
    metrics = made.update(batch, 0)
    assert engine.inferred == []
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(0.25, abs=1e-4)
    first, _ = engine.trained[0]
    assert metrics["mismatch/num_tokens"] == int(first.tokens["loss_mask"].sum())
    scored = [t for t in batch.sessions if t.id in batch.trainer_logprobs]
    assert 0 < len(scored) < len(batch.sessions)  # of the second mini-batch nothing is known
    for trajectory in scored:
        (values,), (segment,) = batch.trainer_logprobs[trajectory.id], trajectory.segments
        mask = segment.loss_mask
        assert np.isnan(values[~mask]).all()
        np.testing.assert_allclose(values[mask], segment.logprobs[mask] + 0.25, atol=1e-4)


def test_the_first_step_is_measured_before_it_trains(model: Any) -> None:
    algo = AlgoConfig()
    made, engine = learner(model, algo)
    batch, _ = made.assign_credit(prepared(model, algo, off=-0.25))
    metrics = made.measure_mismatch(batch, 0)
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(0.25, abs=1e-4)
    assert engine.trained == [] and engine.inferred == [("logprobs",)]


def test_the_record_of_a_step_does_not_say_that_a_process_began_with_it(model: Any) -> None:
    algo = AlgoConfig()

    def recorded(*, is_first: bool) -> dict[str, list[np.ndarray]]:
        made, _ = learner(model, algo)
        if not is_first:
            made.measure_mismatch(made.assign_credit(prepared(model, algo))[0], 0)
        groups = groups_of(model)
        for member in groups[0].trajectories:  # all the same: scored at the first step alone
            member.score = Score(reward=1.0, success=True)
        batch, _ = made.assign_credit(assemble(groups, {"e": algo}))
        assert bool(made.measure_mismatch(batch, 0)) == is_first
        made.update(batch, 0)
        assert (
            set(batch.trainer_logprobs)
            == set(batch.trained_ids)
            < {member.id for member in batch.sessions}
        )
        return batch.trainer_logprobs

    first, later = recorded(is_first=True), recorded(is_first=False)
    assert first.keys() == later.keys()
    for name in first:
        for one, other in zip(first[name], later[name], strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_step_that_trains_nothing_is_measured_too(model: Any) -> None:
    algo = AlgoConfig()
    made, engine = learner(model, algo)
    made.measure_mismatch(made.assign_credit(prepared(model, algo))[0], 0)
    groups = groups_of(model, off=-0.25)
    for member in groups[0].trajectories + groups[1].trajectories:
        member.score = Score(reward=1.0, success=True)
    batch, _ = made.assign_credit(assemble(groups, {"e": algo}))
    assert batch.batch is None
    metrics = made.measure_mismatch(batch, 0)
    assert metrics["mismatch/logprob_abs_mean"] == pytest.approx(0.25, abs=1e-4)
    assert set(batch.trainer_logprobs) == {member.id for member in batch.sessions}


def test_what_the_decoupled_mode_scores_is_measured_whole_before_it_rejects(model: Any) -> None:
    rule = RejectConfig(statistic="token_k2", high=0.01)
    algo = AlgoConfig(
        old_logprobs=OldLogprobs.recompute, correction=CorrectionConfig(reject=[rule])
    )
    made, engine = learner(model, algo)
    groups = groups_of(model)
    victim = groups[0].trajectories[0].segments[0]
    victim.logprobs[3] -= 1.5  # the second of its sampled tokens
    batch, _ = made.assign_credit(assemble(groups, {"e": algo}))
    metrics = made.measure_mismatch(batch, 0)
    assert engine.inferred == [("logprobs",)]
    assert metrics["mismatch/logprob_abs_max"] == pytest.approx(1.5, abs=1e-4)
    assert metrics["mismatch/num_tokens"] == sum(t.num_sampled_tokens for t in batch.sessions)
    assert metrics["mismatch/by_turn/turn_1"] > 0.01 > 1e-4 > metrics["mismatch/by_turn/turn_2"]
    assert "mismatch/k3_kl" not in made.update(batch, 0)


def test_tokens_of_older_versions_are_told_apart(model: Any) -> None:
    algo = AlgoConfig()
    made, _ = learner(model, algo)
    groups = groups_of(model)
    for member in groups[1].trajectories:
        (segment,) = member.segments
        segment.policy_version = np.where(segment.loss_mask, 5, -1).astype(np.int32)
        segment.logprobs = np.where(segment.loss_mask, segment.logprobs - 0.5, 0).astype(np.float32)
    for member in groups[0].trajectories:
        (segment,) = member.segments
        segment.policy_version = np.where(segment.loss_mask, 7, -1).astype(np.int32)
    batch, _ = made.assign_credit(assemble(groups, {"e": algo}))
    metrics = made.measure_mismatch(batch, 7)
    assert metrics["mismatch/stale/logprob_abs_mean"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["mismatch/current/logprob_abs_max"] < 1e-4
    assert metrics["mismatch/current_fraction"] == 0.5
