from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.config import CreditConfig
from agentrl.batch import Batch
from agentrl.errors import TrainingError
from agentrl.testing.sessions import make_group, make_session
from agentrl.train.assemble import TrainBatch, assemble, split_sessions, weighted_rewards
from agentrl.types import StopReason, ToolResult, ToolStatus, TrajectoryGroup


def assembled(*groups: TrajectoryGroup, **settings: object) -> TrainBatch:
    return assemble(groups, {"e": CreditConfig(**settings)})  # type: ignore[arg-type]


def test_tokens_know_their_session_and_turn_in_every_segment() -> None:
    two = make_session("two", 1.0, [[0, 1, 1, 0, 1], [0, 0, 1]])
    made = assembled(make_group(two, make_session("one", 0.0, [[0, 1]])))
    assert made.batch is not None
    assert made.batch.rows["session"].tolist() == [0, 0, 1]
    assert made.batch.tokens["turn"].tolist() == [-1, 0, 0, -1, 1, -1, -1, 2, -1, 0]
    assert made.credit.turns_per_session.tolist() == [3, 1]
    assert made.credit.tokens_per_turn.tolist() == [2, 1, 1, 1]
    assert made.credit.num_tokens == int(made.batch.tokens["loss_mask"].sum())


def test_a_failed_member_and_a_group_that_was_given_up_are_not_there() -> None:
    kept = make_group(make_session("a", 1.0), make_session("b", 0.0), make_session("f", None))
    lost = make_group(make_session("c", 1.0), make_session("d", 0.0), index=1)
    lost.gave_up = True
    made = assembled(kept, lost)
    assert [session.id for session in made.sessions] == ["a", "b"]
    assert made.credit.group.tolist() == [0, 0]
    assert "1 env_error" in made.why_empty


def test_rewards_of_outcome_turns_tools_and_parts_add_up_with_their_weights() -> None:
    played = make_session("a", 1.0, [[0, 1, 0, 1]], turn_rewards=(0.25, 0.5), parts={"format": 0.5})
    played.turns[1].tool_results.append(
        ToolResult(name="t", content="", status=ToolStatus.OK, reward=2.0)
    )
    weights = {"outcome": 1.0, "turn": 2.0, "tool": 0.5, "format": -1.0}
    assert weighted_rewards(played, weights) == {
        "outcome": 1.0,
        "turn": 1.5,
        "tool": 1.0,
        "format": -0.5,
    }
    credit = assembled(make_group(played), reward_weights=weights).credit
    assert credit.turn_rewards.tolist() == [0.5, 2.0]
    assert credit.outcome_rewards.tolist() == [0.5]
    assert credit.returns.tolist() == [3.0]
    assert {name: float(value) for name, value in credit.named_weights.items()} == weights
    assert {name: value.tolist() for name, value in credit.named_rewards.items()} == {
        "outcome": [1.0],
        "turn": [1.5],
        "tool": [1.0],
        "format": [-0.5],
    }


def test_a_weight_for_a_part_that_the_rubric_did_not_give_is_refused_with_those_there_are() -> None:
    played = make_session("a", 1.0, parts={"format": 0.5})
    with pytest.raises(TrainingError, match=r"reward_weights\.frmat.*outcome, turn, tool, format"):
        assembled(make_group(played), reward_weights={"frmat": 1.0})


def test_anchors_are_equal_within_a_group_only() -> None:
    first = make_group(
        make_session("a", 1.0, [[0, 1, 0, 1]], anchors=["s", "t"]),
        make_session("b", 1.0, [[0, 1, 0, 1]], anchors=["s"]),
    )
    second = make_group(make_session("c", 1.0, anchors=["s"]), index=1)
    anchors = assembled(first, second).credit.anchors
    assert anchors is not None
    s, t, again, none, other = anchors.tolist()
    assert s == again and none == -1
    assert len({s, t, other}) == 3


def test_a_greedy_baseline_is_weighed_like_the_members() -> None:
    group = make_group(make_session("a", 1.0), make_session("b", 0.0))
    group.baseline = make_session("greedy", 0.5, turn_rewards=(1.0,))
    greedy = assembled(group, reward_weights={"outcome": 2.0, "turn": 1.0}).credit.greedy_rewards
    assert greedy is not None
    assert greedy.tolist() == [2.0, 2.0]


def test_a_branch_gives_its_own_turns_and_the_rewards_of_its_prefix() -> None:
    trunk = make_session("trunk", 1.0, [[0, 1, 0, 1]], turn_rewards=(0.5, 0.25))
    branch = make_session("branch", 0.0, [[0, 0, 0, 1]], turn_rewards=(0.5, 0.125), sample_index=1)
    inherited, own = make_session("x", 0.0, [[0, 1, 0, 1]], turn_rewards=(0.5, 0.125)).turns
    inherited.inherited, inherited.end = True, inherited.start
    branch.turns, branch.parent, branch.branch_turn = [inherited, own], 0, 1
    credit = assembled(make_group(trunk, branch)).credit
    assert credit.turns_per_session.tolist() == [2, 1]
    assert credit.turn_rewards.tolist() == [0.5, 0.25, 0.125]
    assert credit.returns.tolist() == [1.75, 0.625]
    assert credit.parent is not None and credit.branch_turn is not None
    assert credit.parent.tolist() == [-1, 0]
    assert credit.branch_turn.tolist() == [0, 1]


def test_a_branch_finds_its_parent_in_its_own_group_and_has_none_where_that_failed() -> None:
    def tree(name: str, *, failed: bool) -> TrajectoryGroup:
        trunk = make_session(f"{name}-trunk", None if failed else 1.0, sample_index=0)
        branch = make_session(f"{name}-branch", 0.0, sample_index=1)
        branch.parent, branch.branch_turn = 0, 1
        return make_group(trunk, branch)

    credit = assembled(tree("a", failed=True), tree("b", failed=False)).credit
    assert credit.parent is not None and credit.branch_turn is not None
    assert credit.parent.tolist() == [-1, -1, 1]  # a's branch, b's trunk, b's branch
    assert credit.branch_turn.tolist() == [1, 0, 1]


def test_an_episode_that_a_limit_ended_is_truncated() -> None:
    ended, cut = make_session("a", 1.0), make_session("b", 1.0)
    cut.stop_reason = StopReason.MAX_TURNS
    assert assembled(make_group(ended, cut)).credit.truncated.tolist() == [False, True]


def test_without_a_greedy_episode_of_every_prompt_there_are_no_greedy_rewards() -> None:
    played, bare = make_group(make_session("a", 1.0)), make_group(make_session("b", 1.0), index=1)
    played.baseline = make_session("greedy", 0.5)
    assert assembled(played, bare).credit.greedy_rewards is None
    bare.gave_up = True  # its members are not there, so nobody asks for its baseline
    greedy = assembled(played, bare).credit.greedy_rewards
    assert greedy is not None and greedy.tolist() == [0.5]


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
