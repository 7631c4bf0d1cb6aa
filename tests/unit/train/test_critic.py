"""A step with a critic: what it is asked, what it learns, and what the policy gets from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algo.config import (
    AlgoConfig,
    CorrectionConfig,
    CreditConfig,
    OldLogprobs,
    RejectConfig,
)
from agentrl.algo.loss import make_loss
from agentrl.dist.config import ActorConfig, CriticConfig
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.errors import TrainingError
from agentrl.testing.random_models import build
from agentrl.testing.sessions import make_group, make_session
from agentrl.testing.table_engine import TableEngine
from agentrl.train.assemble import TrainBatch, assemble
from agentrl.train.critic import Critic, turn_boundaries
from agentrl.train.learner import Learner
from agentrl.types import StopReason, Trajectory

# Tokens of a session are 0, 1, 2, ...; the critic's value of a state is that of its last token.
VALUES = [0.0, 0.5, 0.25, -1.0, 1.0, 0.125, 2.0, -0.5]
TWO_TURNS = [0, 1, 1, 0, 0, 1, 1]
"""Sampled: tokens 1, 2 and 5, 6; so states end in 0, 1 and 4, 5, and the last turn leaves 6."""
RAW = {"whiten": False}


def session(name: str, reward: float, *, cut: bool = False, **kwargs: Any) -> Trajectory:
    made = make_session(name, reward, [TWO_TURNS], turn_rewards=(0.5, 0.25), **kwargs)
    made.stop_reason = StopReason.MAX_TURNS if cut else StopReason.TERMINATED
    return made


def learner(
    algo: AlgoConfig,
    *,
    credit: dict[str, CreditConfig] | None = None,
    values: Sequence[float] = VALUES,
    actor_lr: float = 1e-3,
    **settings: Any,
) -> tuple[Learner, TableEngine, TableEngine]:
    engine, table = TableEngine([-0.5] * 8, lr=actor_lr), TableEngine(values)
    made = Learner(
        engine,
        algo=algo,
        credit=credit or {"e": algo},
        token_loss=make_loss(algo.loss, algo.loss_kwargs),
        optimization=ActorConfig(lr=actor_lr),
        loss_agg_tokens=100,
        seed=0,
        critic=Critic(engine=table, config=CriticConfig(**settings), seed=0),
    )
    return made, table, engine


def credited(
    sessions: Sequence[Trajectory], made: Learner, **kwargs: Any
) -> tuple[TrainBatch, dict[str, Any]]:
    groups = [make_group(*sessions, **kwargs)]
    return made.assign_credit(assemble(groups, made.credit))


def of_critic(batch: TrainBatch) -> tuple[list[int], list[float], list[float]]:
    """Tokens that it is trained at, what it said there, and what it is to say."""
    assert batch.critic is not None
    tokens = batch.critic.tokens
    mask = tokens["loss_mask"]
    return (
        tokens["ids"][mask].tolist(),
        tokens["values"][mask].tolist(),
        tokens["value_targets"][mask].tolist(),
    )


def advantages_of(batch: TrainBatch, name: str) -> list[float]:
    return batch.advantages[name][0][np.array(TWO_TURNS, dtype=bool)].tolist()


def test_two_turns_by_hand() -> None:
    """Rewards: 0.5 with token 2, 0.25 + 2 with token 6. gamma 0.5, lambda 0.5."""
    algo = AlgoConfig(advantage="gae", gamma=0.5, lam=0.5, advantage_kwargs=RAW)
    made, table, _ = learner(algo)
    batch, _ = credited([session("a", 2.0)], made)
    # States end in the tokens 0, 1, 4, 5: V = 0, 0.5, 1, 0.125, and 0 after the end.
    d6 = 2.25 - 0.125
    d5 = 0.5 * 0.125 - 1.0
    d2 = 0.5 + 0.5 * 1.0 - 0.5
    d1 = 0.5 * 0.5 - 0.0
    a6 = d6
    a5 = d5 + 0.25 * a6
    a2 = d2 + 0.25 * a5
    a1 = d1 + 0.25 * a2
    assert advantages_of(batch, "a") == pytest.approx([a1, a2, a5, a6])
    ids, values, targets = of_critic(batch)
    # Token 3 begins the observation: the state before it, which ends in 2, is worth what the next
    # turn is (the state before token 5).
    assert ids == [1, 2, 3, 5, 6]
    assert values == [0.0, 0.5, 0.25, 1.0, 0.125]
    assert targets == pytest.approx([a1 + 0.0, a2 + 0.5, a5 + 1.0, a5 + 1.0, a6 + 0.125])
    assert table.asked == [(("values",), 1)], "one pass; nothing is cut short"


@pytest.mark.parametrize("advantage", ["gae", "turn_gae", "bilevel_gae"])
def test_a_truncated_session_goes_on_with_the_value_of_the_state_it_stopped_in(
    advantage: str,
) -> None:
    algo = AlgoConfig(advantage=advantage, gamma=0.5, lam=1.0, advantage_kwargs=RAW)
    made, table, _ = learner(algo)
    batch, _ = credited([session("ended", 0.0), session("cut", 0.0, cut=True)], made)
    ended, cut = advantages_of(batch, "ended"), advantages_of(batch, "cut")
    assert cut[-1] - ended[-1] == pytest.approx(0.5 * VALUES[6])
    assert table.asked == [(("values", "next_values"), 2)]
    # Values of states that no token was chosen in are not read where the environment ended it.
    made, _, _ = learner(algo, values=[*VALUES[:6], 77.0, VALUES[7]])
    other, _ = credited([session("ended", 0.0)], made)
    assert advantages_of(other, "ended") == ended


def test_turn_gae_trains_the_critic_where_turns_begin_and_end() -> None:
    algo = AlgoConfig(advantage="turn_gae", gamma=1.0, lam=1.0, advantage_kwargs=RAW)
    made, _, _ = learner(algo)
    batch, _ = credited([session("a", 2.0)], made)
    ids, _, targets = of_critic(batch)
    assert (ids, targets) == ([1, 3, 5], [2.75, 2.25, 2.25])


def test_a_session_of_several_segments_is_read_across_them() -> None:
    algo = AlgoConfig(advantage="gae", gamma=1.0, lam=0.0, advantage_kwargs=RAW)
    made, _, _ = learner(algo)
    parted = make_session("a", 1.0, [[0, 1], [0, 0, 0, 1, 0]])
    batch, _ = credited([parted], made)
    # V' of the first segment's last token is V of the second one's first: that after token 2.
    assert batch.advantages["a"][0].tolist() == pytest.approx([0, VALUES[2] - VALUES[0]])
    assert batch.advantages["a"][1][3] == pytest.approx(1.0 - VALUES[2])
    assert of_critic(batch)[0] == [1, 3], "no token of the first row stands after its turn"


def test_only_environments_that_read_values_ask_and_train_the_critic() -> None:
    algo = AlgoConfig(advantage="gae", advantage_kwargs=RAW)
    credit = {"e": algo, "f": CreditConfig(advantage="rloo")}
    made, table, _ = learner(algo, credit=credit)
    groups = [
        make_group(session("f0", 1.0, env_id="f"), session("f1", 0.0, env_id="f"), index=0),
        make_group(session("e0", 1.0), session("e1", 0.0, cut=True), index=1),
    ]
    groups[0].env_id = "f"
    batch, _ = made.assign_credit(assemble(groups, credit))
    assert table.asked == [(("values", "next_values"), 2)]
    assert batch.critic is not None
    assert batch.critic.rows["session"].tolist() == [2, 3]
    assert advantages_of(batch, "f0") == [1.0] * 4, "as if there were no critic"
    alone, _, _ = learner(algo)
    own, _ = alone.assign_credit(assemble([groups[1]], {"e": algo}))
    for name in ("e0", "e1"):
        assert advantages_of(batch, name) == advantages_of(own, name)


def test_a_truncation_elsewhere_in_the_mix_asks_for_no_bootstrap() -> None:
    algo = AlgoConfig(advantage="gae", advantage_kwargs=RAW)
    credit = {"e": algo, "f": CreditConfig(advantage="reinforce_plus_plus")}
    made, table, _ = learner(algo, credit=credit)
    groups = [make_group(session("f", 1.0, env_id="f", cut=True)), make_group(session("e", 1.0))]
    made.assign_credit(assemble(groups, credit))
    assert table.asked == [(("values",), 1)]


def test_a_group_without_signal_trains_the_critic_and_not_the_policy() -> None:
    algo = AlgoConfig(advantage="gae", advantage_kwargs=RAW)
    made, table, engine = learner(algo, values=[0.0] * 8)
    flat = make_session("flat", 0.0, [TWO_TURNS])
    batch, _ = credited([flat], made)
    assert batch.batch is None and not batch.is_empty
    metrics = made.update(batch, 0)
    assert metrics["critic/updates"] == 1 and metrics["actor/updates"] == 0
    assert table.num_updates == 1 and engine.num_updates == 0


def test_the_critic_moves_towards_its_targets_and_the_policy_does_not_move_it() -> None:
    algo = AlgoConfig(advantage="gae", gamma=1.0, lam=1.0, advantage_kwargs=RAW)
    made, table, engine = learner(algo, actor_lr=0.0, value_clip=None)
    batch, _ = credited([session("a", 2.0)], made)
    metrics = made.update(batch, 0)
    # Five tokens of equal weight: gradient (V - R) / 5, at a rate of 0.1.
    _, _, targets = of_critic(batch)
    for token, target in zip([0, 1, 2, 4, 5], targets, strict=True):
        want = VALUES[token] - 0.1 * (VALUES[token] - target) / 5
        assert table.table[token].item() == pytest.approx(want)
    assert table.table[[3, 6, 7]].tolist() == [VALUES[3], VALUES[6], VALUES[7]]
    assert engine.table.tolist() == [-0.5] * 8
    errors = [VALUES[t] - r for t, r in zip([0, 1, 2, 4, 5], targets, strict=True)]
    assert metrics["critic/loss"] == pytest.approx(0.5 * float(np.mean(np.square(errors))))
    assert metrics["critic/vpred_mean"] == pytest.approx(0.375)
    assert metrics["critic/lr"] == 0.1 and metrics["critic/skipped_updates"] == 0


def test_explained_variance_is_that_of_the_values_before_the_step() -> None:
    algo = AlgoConfig(advantage="gae", gamma=0.9, lam=0.5, advantage_kwargs=RAW)
    made, _, _ = learner(algo, epochs=3, updates_per_step=2)
    batch, _ = credited([session("a", 2.0), session("b", -1.0, cut=True)], made)
    _, values, targets = of_critic(batch)
    residual = np.array(targets) - np.array(values)
    want = 1 - residual.var() / np.array(targets).var()
    metrics = made.update(batch, 0)
    assert metrics["critic/explained_variance"] == pytest.approx(want, abs=1e-6)
    assert metrics["critic/updates"] == 6


def test_the_clip_holds_predictions_that_moved_far_from_where_they_were() -> None:
    algo = AlgoConfig(advantage="gae", gamma=1.0, lam=1.0, advantage_kwargs=RAW)
    far: dict[float | None, float] = {}
    for clip in (0.05, None):
        made, table, _ = learner(algo, epochs=40, value_clip=clip)
        batch, _ = credited([session("a", 2.0)], made)
        metrics = made.update(batch, 0)
        far[clip] = float((table.table.detach() - torch.tensor(VALUES)).abs().max())
        assert (metrics["critic/vf_clipfrac"] > 0) == (clip is not None)
    assert far[0.05] < 0.15 < far[None]


def test_the_gradient_of_the_critic_does_not_depend_on_micro_batches() -> None:
    algo = AlgoConfig(advantage="gae", lam=0.9)
    found = []
    for budget in (1, 10_000):
        made, table, _ = learner(algo, tokens_per_micro_batch=budget)
        sessions = [session(f"{i}", float(i), cut=i == 1) for i in range(3)]
        sessions.append(make_session("short", 0.5, [[0, 1]]))
        batch, _ = credited(sessions, made)
        metrics = made.update(batch, 0)
        assert metrics["critic/micro_batches"] == (4 if budget == 1 else 1)
        found.append((table.table.detach().clone(), metrics["critic/loss"]))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-6, rtol=0)
    assert found[0][1] == pytest.approx(found[1][1], abs=1e-6)


def test_in_its_head_start_the_critic_learns_alone() -> None:
    algo = AlgoConfig(advantage="gae", advantage_kwargs=RAW)
    made, table, engine = learner(algo, head_start_steps=2)
    for step in range(3):
        batch, _ = credited([session("a", 2.0), session("b", 1.0)], made)
        metrics = made.update(batch, step)
        assert table.num_updates == step + 1
        assert metrics["actor/updates"] == engine.num_updates == (step == 2)
        assert metrics.get("critic/head_start", 0) == (step < 2)


def test_what_the_correction_rejects_trains_neither() -> None:
    algo = AlgoConfig(
        advantage="gae",
        advantage_kwargs=RAW,
        old_logprobs=OldLogprobs.recompute,
        correction=CorrectionConfig(reject=[RejectConfig(statistic="token_k2", high=50.0)]),
    )
    made, _, _ = learner(algo)
    odd = session("a", 2.0)
    odd.segments[0].logprobs[5] = -100.0
    batch, metrics = credited([odd], made)
    assert batch.batch is not None
    assert batch.batch.tokens["loss_mask"].nonzero().squeeze(1).tolist() == [1, 2, 6]
    assert of_critic(batch)[0] == [1, 2, 6], "nor the state that would have learned from it"
    assert metrics["correction/rs_token_k2_masked_fraction"] == 0.25


def test_a_critic_that_has_diverged_is_named() -> None:
    algo = AlgoConfig(advantage="gae")
    made, _, _ = learner(algo, values=[float("nan"), *VALUES[1:]])
    with pytest.raises(TrainingError, match=r"the critic gave 1 values .* lower critic.lr"):
        credited([session("a", 2.0)], made)


def test_boundaries_of_turns_are_found_within_rows_and_sessions() -> None:
    sessions = [
        make_session("a", 1.0, [[0, 1, 0, 1, 1, 0]]),  # one boundary, nothing after the last turn
        make_session("b", 1.0, [[0, 1, 0], [0, 1]]),  # a second segment
        make_session("c", 1.0, [[0, 0, 1]]),
    ]
    packed = assemble([make_group(*sessions)], {"e": CreditConfig()}).batch
    assert packed is not None
    places, following = turn_boundaries(packed)
    assert places.tolist() == [2, 8] and following.tolist() == [1, 4]


def test_a_value_head_on_a_model_comes_to_tell_good_states_from_bad_ones() -> None:
    """Sessions that begin with token 3 earn 1, those that begin with token 4 nothing."""
    config = CriticConfig(lr=1e-2, epochs=60, value_clip=None, tokens_per_micro_batch=20)
    engine = FSDPEngine(build("qwen3"), None, config, ranks=Ranks.single("cpu"), head="value")
    algo = AlgoConfig(advantage="gae", advantage_kwargs=RAW)
    made, _, _ = learner(algo)
    made.critic = Critic(engine=engine, config=config, seed=0)

    def step() -> tuple[TrainBatch, dict[str, float]]:
        sessions = [make_session(f"{i}", float(i % 2), [TWO_TURNS]) for i in range(6)]
        for i, one in enumerate(sessions):
            one.segments[0].ids[0] = 3 if i % 2 else 4
        batch, _ = credited(sessions, made)
        return batch, made.update(batch, 0)

    first, before = step()
    assert of_critic(first)[1] == [0.0] * 30 and before["critic/explained_variance"] == 0
    second, after = step()
    assert after["critic/explained_variance"] > 0.9
    assert all(abs(a) < 0.3 for name in "01" for a in advantages_of(second, name))
    assert max(abs(a) for a in advantages_of(first, "1")) == 1.0
