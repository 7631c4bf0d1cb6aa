from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.batch import Batch
from agentrl.train.assemble import assemble, split_sessions, weighted_return
from agentrl.train.config import AlgoConfig
from agentrl.types import Score, Segment, StopReason, Task, Trajectory, TrajectoryGroup, Turn

TASK = Task(id="t", data={})


def segment(mask: list[int]) -> Segment:
    sampled = np.array(mask, dtype=bool)
    return Segment(
        ids=np.arange(len(mask), dtype=np.int64),
        loss_mask=sampled,
        logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32),
        policy_version=np.where(sampled, 0, -1).astype(np.int32),
        roles=np.where(sampled, 4, 1).astype(np.int8),
    )


def trajectory(
    name: str, reward: float | None, masks: list[list[int]], turn_rewards: tuple[float, ...] = ()
) -> Trajectory:
    return Trajectory(
        id=name,
        env_id="e",
        task=TASK,
        group_id="g",
        sample_index=0,
        attempt=0,
        seed=0,
        segments=[segment(mask) for mask in masks],
        turns=[
            Turn(index=i, segment=0, start=0, end=1, stop_reason=StopReason.STOP, reward=value)
            for i, value in enumerate(turn_rewards)
        ],
        messages=[],
        stop_reason=StopReason.ENV_ERROR if reward is None else StopReason.TERMINATED,
        score=None if reward is None else Score(reward=reward, success=reward > 0),
    )


def group(*members: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(
        id="g", task=TASK, env_id="e", trajectories=list(members), policy_version=0
    )


def test_advantages_stand_on_sampled_tokens_of_every_segment_and_nowhere_else() -> None:
    good = trajectory("good", 1.0, [[0, 1, 1], [0, 0, 1]])
    bad = trajectory("bad", 0.0, [[0, 1]])
    made = assemble([group(good, bad)], AlgoConfig(normalize_std=False))
    assert made.batch is not None
    assert made.batch.rows["session"].tolist() == [0, 0, 1]
    expected = [0, 0.5, 0.5, 0, 0, 0.5, 0, -0.5]
    assert made.batch.tokens["advantages"].tolist() == pytest.approx(expected)
    assert [a.tolist() for a in made.advantages["good"]] == [[0, 0.5, 0.5], [0, 0, 0.5]]
    assert made.trained_ids == {"good", "bad"}


def test_a_failed_member_leaves_the_baseline_and_does_not_train() -> None:
    members = [
        trajectory("a", 1.0, [[0, 1]]),
        trajectory("b", 0.0, [[0, 1]]),
        trajectory("failed", None, [[0, 1]]),
    ]
    with_failure = assemble([group(*members)], AlgoConfig())
    without = assemble([group(*members[:2])], AlgoConfig())
    assert with_failure.batch is not None and without.batch is not None
    assert torch.equal(with_failure.batch.tokens["advantages"], without.batch.tokens["advantages"])
    assert "failed" not in with_failure.trained_ids


def test_groups_without_a_difference_are_left_out_and_an_empty_step_says_why() -> None:
    flat = group(trajectory("a", 1.0, [[0, 1]]), trajectory("b", 1.0, [[0, 1]]))
    lost = group(trajectory("c", None, [[0, 1]]))
    made = assemble([flat, lost], AlgoConfig())
    assert made.is_empty and made.num_tokens == 0
    assert "2 of 2 groups" in made.why_empty and "1 env_error" in made.why_empty
    kept = assemble([flat], AlgoConfig(drop_zero_variance=False))
    assert kept.batch is not None
    assert not kept.batch.tokens["advantages"].any()


def test_rewards_of_turns_and_outcome_add_up_with_their_weights() -> None:
    played = trajectory("a", 1.0, [[0, 1]], turn_rewards=(0.25, 0.5))
    assert weighted_return(played, AlgoConfig()) == pytest.approx(1.75)
    assert weighted_return(played, AlgoConfig(turn_reward_weight=2.0)) == pytest.approx(2.5)
    assert weighted_return(played, AlgoConfig(outcome_reward_weight=0.0)) == pytest.approx(0.75)


def test_a_session_without_sampled_tokens_does_not_train() -> None:
    silent = trajectory("silent", 0.0, [[0, 0]])
    made = assemble([group(silent, trajectory("a", 1.0, [[0, 1]]))], AlgoConfig())
    assert made.trained_ids == {"a"}


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    num_parts=st.integers(1, 5),
    seed=st.integers(0, 100),
    data=st.data(),
)
def test_mini_batches_hold_every_session_once_and_whole(
    lengths: list[int], num_parts: int, seed: int, data: st.DataObject
) -> None:
    sessions = sorted(
        data.draw(st.lists(st.integers(0, 6), min_size=len(lengths), max_size=len(lengths)))
    )
    batch = Batch.from_rows(
        {"ids": [torch.full((length,), row) for row, length in enumerate(lengths)]},
        {"session": torch.tensor(sessions)},
    )
    parts = split_sessions(batch, num_parts, seed=seed)
    assert len(parts) == min(num_parts, len(set(sessions)))
    where: dict[int, int] = {}
    rows = []
    for index, part in enumerate(parts):
        for session in set(part.rows["session"].tolist()):
            assert where.setdefault(session, index) == index
        rows += [int(part.tokens["ids"][start]) for start in part.cu_seqlens[:-1]]
    assert sorted(rows) == list(range(len(lengths)))
    again = split_sessions(batch, num_parts, seed=seed)
    assert all(
        torch.equal(a.tokens["ids"], b.tokens["ids"]) for a, b in zip(parts, again, strict=True)
    )
