"""Tree sampling: branches are exact, deterministic, trained once, and fail alone."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import Guesser, ids_of, sample_group

from agentrl.agent.branch import BranchPoint
from agentrl.agent.limits import LoopLimits
from agentrl.algo.config import CreditConfig
from agentrl.algo.credit import get_estimator
from agentrl.env.base import Env, Episode
from agentrl.errors import ConfigError, EnvError
from agentrl.rollout.config import FailureConfig, FailurePolicy, TreeConfig
from agentrl.rollout.groups import Sample, is_trainable
from agentrl.rollout.tree import choose_node, deal_members, refuse_unbranchable
from agentrl.telemetry.metrics import rollout_metrics
from agentrl.telemetry.trajectory_io import read_trajectories, write_trajectories
from agentrl.testing import EchoEnv, call_text
from agentrl.tool.binding import Toolbox
from agentrl.train.assemble import assemble
from agentrl.types import (
    Action,
    Score,
    StopReason,
    Task,
    TokenRole,
    ToolStatus,
    Trajectory,
    TrajectoryGroup,
)

TREE = TreeConfig(rounds=2, trunks=2)
PAID = {"turn_reward": 1.0}
ECHO_TASK = Task(id="t", data={"word": "yes"})


def branches(group: TrajectoryGroup) -> list[tuple[Trajectory, Trajectory]]:
    """Return (branch, its parent) of every branch."""
    by_index = {member.sample_index: member for member in group.trajectories}
    return [(t, by_index[t.parent]) for t in group.trajectories if t.parent is not None]


# ------------------------------------------------------------------ exactness


@pytest.mark.parametrize("seed", range(4))
def test_a_branch_begins_with_its_parents_tokens_and_trains_none_of_them(seed: int) -> None:
    group = sample_group(8, TREE, kwargs=PAID, seed=seed)
    assert [member.sample_index for member in group.trajectories] == list(range(8))
    assert [member.parent for member in group.trajectories[:2]] == [None, None]
    assert len(branches(group)) == 6
    for branch, parent in branches(group):
        turn = branch.branch_turn
        assert not parent.turns[turn].inherited, "the parent reached the state itself"
        at = parent.turns[turn].start
        segment = branch.segments[0]
        assert ids_of(branch)[:at] == ids_of(parent)[:at]
        assert branch.turns[turn].start == at
        assert not segment.loss_mask[:at].any()
        assert not segment.logprobs[:at].any() and (segment.policy_version[:at] == -1).all()
        own = {position for t in branch.turns for position in range(t.start, t.end)}
        assert set(np.flatnonzero(segment.loss_mask).tolist()) == own
        theirs = parent.segments[0].roles[:at]
        expected = np.where(theirs == TokenRole.SAMPLED, TokenRole.ASSISTANT, theirs)
        assert (segment.roles[:at] == expected).all()


@pytest.mark.parametrize("seed", range(4))
def test_every_sampled_token_of_a_tree_is_trained_exactly_once(seed: int) -> None:
    engine = Guesser()
    group = sample_group(9, TREE, engine=engine, seed=seed)
    assert any(t.branch_turn > 0 for t in group.trajectories)
    trained = Counter[tuple[int, ...]]()
    for member in group.trajectories:
        segment = member.segments[0]
        for position in np.flatnonzero(segment.loss_mask).tolist():
            trained[tuple(segment.ids[: position + 1].tolist())] += 1
    sampled = Counter[tuple[int, ...]]()
    for request, member in requests_with_members(engine, group):
        at = len(request.prompt_ids)
        turn = next(t for t in member.turns if t.start == at and not t.inherited)
        for end in range(at, turn.end):
            sampled[tuple(ids_of(member)[: end + 1])] += 1
    assert trained == sampled
    assert trained.total() == engine.num_tokens


def requests_with_members(engine: Guesser, group: TrajectoryGroup) -> list[tuple[Any, Trajectory]]:
    members = {member.id: member for member in group.trajectories}
    return [(request, members[request.session_id]) for request in engine.requests]


def test_the_whole_episode_is_seen_by_grading_and_its_own_turns_by_credit() -> None:
    group = sample_group(8, TREE, kwargs=PAID, seed=1)
    deep = [pair for pair in branches(group) if pair[0].branch_turn > 0]
    assert deep
    for branch, parent in deep:
        k = branch.branch_turn
        assert [turn.index for turn in branch.turns] == list(range(len(branch.turns)))
        assert [turn.inherited for turn in branch.turns[:k]] == [True] * k
        assert not any(turn.inherited for turn in branch.turns[k:]) and branch.turns[k:]
        assert all(turn.start == turn.end and not turn.timings_s for turn in branch.turns[:k])
        paid = [(turn.reward, turn.anchor) for turn in branch.turns[:k]]
        assert paid == [(turn.reward, turn.anchor) for turn in parent.turns[:k]]
        assert branch.messages[: 2 * k + 1] == parent.messages[: 2 * k + 1]
        assert branch.score is not None
        total = branch.score.reward + sum(turn.reward for turn in branch.turns)
        assert branch.total_reward == pytest.approx(total)
        # Rewards of guess_number are differences of potentials: a found number is worth 1 in all.
        solved = branch.score.success
        assert sum(turn.reward for turn in branch.turns) == pytest.approx(1.0) or not solved


@pytest.mark.parametrize("seed", range(3))
def test_credit_sees_whole_returns_and_parents_by_position(seed: int) -> None:
    group = sample_group(8, TREE, kwargs=PAID, seed=seed)
    batch = assemble([group], {"guess_number": CreditConfig(advantage="tree")})
    credit = batch.credit
    returns = [t.total_reward for t in group.trajectories]
    assert credit.returns.tolist() == pytest.approx(returns)
    assert len(set(np.round(returns, 6))) > 1
    own = [[t for t in member.turns if not t.inherited] for member in group.trajectories]
    assert credit.turns_per_session.tolist() == [len(turns) for turns in own]
    assert credit.parent is not None and credit.branch_turn is not None
    expected = [-1 if t.parent is None else t.parent for t in group.trajectories]
    assert credit.parent.tolist() == expected
    assert credit.branch_turn.tolist() == [t.branch_turn for t in group.trajectories]
    advantages = get_estimator("tree")(credit).advantages
    assert advantages.shape == (sum(t.num_sampled_tokens for t in group.trajectories),)
    assert bool(advantages.any())


def test_from_one_seed_parent_and_branch_go_on_alike() -> None:
    """Whatever a branch restores, it is the state that its parent was in."""
    seeds: dict[int, int] = {}

    def as_the_parent(sample: Sample) -> Sample:
        if sample.branch is None:
            return sample
        return replace(sample, seed=seeds[sample.branch.sample_index])

    def note(sample: Sample, trajectory: Trajectory) -> None:
        seeds[sample.sample_index] = trajectory.seed

    group = sample_group(8, TREE, kwargs=PAID, seed=2, alter=as_the_parent, on_played=note)
    assert len(branches(group)) == 6
    for branch, parent in branches(group):
        assert ids_of(branch) == ids_of(parent)
        assert branch.messages == parent.messages
        assert branch.total_reward == parent.total_reward
        assert [t.anchor for t in branch.turns] == [t.anchor for t in parent.turns]
        own = branch.segments[0].loss_mask
        assert (branch.segments[0].logprobs[own] == parent.segments[0].logprobs[own]).all()


# ------------------------------------------------------------------ determinism, sessions, limits


def told(group: TrajectoryGroup) -> list[Any]:
    return [
        (t.id, t.seed, t.parent, t.branch_turn, ids_of(t), t.total_reward)
        for t in group.trajectories
    ]


def test_a_tree_depends_on_its_seed_and_on_nothing_else() -> None:
    first = sample_group(8, TREE, kwargs=PAID)
    assert told(first) == told(sample_group(8, TREE, kwargs=PAID, concurrency=1))
    assert told(first) == told(sample_group(8, TREE, kwargs=PAID, process=True))
    other = sample_group(8, TREE, kwargs=PAID, seed=1)
    assert [t[2:5] for t in told(first)] != [t[2:5] for t in told(other)]


def test_every_branch_has_a_session_of_its_own_which_ends() -> None:
    engine = Guesser()
    group = sample_group(8, TREE, engine=engine)
    assert sorted(engine.ended) == sorted(t.id for t in group.trajectories)
    assert len(set(engine.ended)) == 8
    begun = {request.session_id for request in engine.requests}
    assert begun == set(engine.ended)


def test_limits_hold_for_the_whole_episode() -> None:
    limits = LoopLimits(max_turns=3)
    group = sample_group(8, TREE, env="agentrl.testing.envs:EchoEnv", kwargs={"num_turns": 9},
                         engine=Says("a"), limits=limits, task=ECHO_TASK)  # fmt: skip
    assert {len(t.turns) for t in group.trajectories} == {3}
    assert {t.stop_reason for t in group.trajectories} == {StopReason.MAX_TURNS}
    limits = LoopLimits(max_turns=9, max_response_tokens=7, max_turn_tokens=7)
    group = sample_group(8, TREE, env="agentrl.testing.envs:EchoEnv", kwargs={"num_turns": 9},
                         engine=Says("a"), limits=limits, task=ECHO_TASK)  # fmt: skip
    assert any(t.branch_turn for t in group.trajectories)
    for member in group.trajectories:
        assert member.stop_reason is StopReason.MAX_RESPONSE_TOKENS
        answered = [m for m in member.messages if m["role"] == "assistant"]
        assert len(answered) == 4, "three turns of two tokens, and one that was cut at the last"


class Says(Guesser):
    """Says one text, or what a function makes of the prompt."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def say(self, prompt: str, rng: random.Random) -> str:
        return self.text


# ------------------------------------------------------------------ tools, drift, rubrics


def test_limits_of_tools_count_calls_before_the_branch(tmp_path: Path) -> None:
    (tmp_path / "impl.py").write_text("def answer(x: int = 0) -> str:\n    return 'yes'\n")
    (tmp_path / "once.yaml").write_text(
        "name: once\ndescription: Answers once.\npython: ./impl.py:answer\n"
        "parameters: {type: object, properties: {x: {type: integer}}}\nlimits: {max_calls: 1}\n"
    )
    tools = [str(tmp_path / "once.yaml")]
    group = sample_group(
        6,
        TreeConfig(rounds=2, trunks=1),
        env="agentrl.testing.envs:EchoEnv",
        kwargs={"num_turns": 3, "tools": tools},
        tools=tools,
        engine=Says(call_text("once", x=1)),
        task=ECHO_TASK,
    )
    assert any(t.branch_turn for t in group.trajectories)
    for member in group.trajectories:
        statuses = [turn.tool_results[0].status for turn in member.turns]
        assert statuses == [ToolStatus.OK, ToolStatus.ERROR, ToolStatus.ERROR]
    calls = rollout_metrics([group])["tool/once/calls"]
    assert calls == sum(not turn.inherited for t in group.trajectories for turn in t.turns)


def test_drift_is_counted_where_it_was_sampled() -> None:
    odd = '<tool_call>\n{"name":"calculator","arguments":{"expression":"1"}}\n</tool_call>'
    group = sample_group(
        6,
        TreeConfig(rounds=1, trunks=1),
        env="agentrl.testing.envs:EchoEnv",
        kwargs={"num_turns": 3, "tools": ["calculator"]},
        tools=["calculator"],
        engine=Says(odd),
        task=ECHO_TASK,
    )
    assert any(t.branch_turn for t in group.trajectories)
    for member in group.trajectories:
        assert member.drift == 3 - member.branch_turn


class PaysLate:
    """Pays turn ``k`` the number of turns after it, which only the end of the episode tells."""

    def score(self, episode: Episode) -> Score:
        count = len(episode.turns)
        return Score(reward=0.0, success=True, turn_rewards=[count - k for k in range(count)])


class EndsByChance(EchoEnv):
    """Ends where the model says so; the grader pays turns at the end."""

    rubric = PaysLate()

    def step(self, action: Action) -> Any:
        self._turn += 1
        return "and?", 0.25, action.content == "stop" or self._turn == 5, False, {}


class StopsByChance(Guesser):
    def say(self, prompt: str, rng: random.Random) -> str:
        return rng.choice(["go", "go", "go", "stop"])


@pytest.mark.parametrize("seed", range(3))
def test_what_a_grader_pays_a_turn_is_not_inherited(seed: int) -> None:
    group = sample_group(
        9, TREE, env=f"{__file__}:EndsByChance", engine=StopsByChance(), task=ECHO_TASK, seed=seed
    )
    for member in group.trajectories:
        count = len(member.turns)
        assert [turn.reward for turn in member.turns] == [0.25 + count - k for k in range(count)]


# ------------------------------------------------------------------ failures


class FailsAfter(EchoEnv):
    """Breaks in the turn in which the model says so."""

    def step(self, action: Action) -> Any:
        if action.content == "break":
            raise OSError("the server is gone")
        return super().step(action)


class Breaks(Guesser):
    """Breaks the environment in the sessions of certain members."""

    def __init__(self, members: Sequence[str]) -> None:
        super().__init__()
        self.members = members

    async def generate(self, request: Any) -> Any:
        self.broken = request.session_id.rpartition("/")[2] in self.members
        return await super().generate(request)

    def say(self, prompt: str, rng: random.Random) -> str:
        return "break" if self.broken else f"go {rng.randint(0, 99)}"


def failing_group(members: Sequence[str], failure: FailureConfig) -> TrajectoryGroup:
    return sample_group(
        8,
        TREE,
        env=f"{__file__}:FailsAfter",
        kwargs={"num_turns": 3},
        engine=Breaks(members),
        failure=failure,
        task=ECHO_TASK,
    )


MASK = FailureConfig(policy=FailurePolicy.mask)


def test_members_whose_trunk_failed_are_played_from_the_start() -> None:
    group = failing_group(["0.0"], MASK)
    assert [t.failed for t in group.trajectories] == [True] + [False] * 7
    first_tree, second_tree = group.trajectories[::2], group.trajectories[1::2]
    assert [t.parent for t in first_tree[1:3]] == [None, None], "nothing to branch from"
    assert first_tree[3].parent in (2, 4), "a later round branches from them"
    assert {t.parent for t in second_tree[1:]} <= {1, 3, 5}
    assert is_trainable(group, MASK)


def test_a_branch_fails_alone_and_nothing_branches_from_it() -> None:
    group = failing_group(["2.0", "4.0"], MASK)
    assert [t.sample_index for t in group.trajectories if t.failed] == [2, 4]
    failed = group.trajectories[2]
    assert failed.parent == 0 and failed.stop_reason is StopReason.ENV_ERROR
    assert "the server is gone" in str(failed.error)
    own = [turn for turn in failed.turns if not turn.inherited]
    assert own[-1].error and not any(turn.error for turn in failed.turns if turn.inherited)
    assert group.trajectories[6].parent == 0


def test_a_failed_branch_is_run_again_from_a_state_drawn_anew() -> None:
    retry = FailureConfig(policy=FailurePolicy.retry_fresh, k=1)
    group = failing_group(["2.0", "3.0"], retry)
    assert not any(t.failed for t in group.trajectories)
    assert [(t.sample_index, t.attempt, t.parent) for t in group.discarded] in (
        [(2, 0, 0), (3, 0, 1)],
        [(3, 0, 1), (2, 0, 0)],
    )
    assert [t.attempt for t in group.trajectories] == [0, 0, 1, 1, 0, 0, 0, 0]


class BrokenStates(EchoEnv):
    """Cannot be restored."""

    def restore(self, state: Any) -> None:
        raise EnvError("the state is gone")


class LockedStates(EchoEnv):
    """Has a state that cannot leave the process."""

    def snapshot(self) -> Any:
        return threading.Lock()


@pytest.mark.parametrize(
    ("env", "failed", "error"),
    [
        ("BrokenStates", [2, 3, 4, 5, 6, 7], "the state is gone"),
        ("LockedStates", [0, 1, 2, 3, 4], "cannot be pickled"),
    ],
)
def test_states_that_cannot_be_kept_or_restored_are_failures_of_the_environment(
    env: str, failed: list[int], error: str
) -> None:
    group = sample_group(
        8, TREE, env=f"{__file__}:{env}", kwargs={"num_turns": 2}, engine=Says("a"), failure=MASK,
        task=ECHO_TASK,
    )  # fmt: skip
    assert [t.sample_index for t in group.trajectories if t.failed] == failed
    for index in failed:
        member = group.trajectories[index]
        assert member.stop_reason is StopReason.ENV_ERROR and error in str(member.error)
        assert member.segments == [] or not member.segments[0].loss_mask.any()


# ------------------------------------------------------------------ the plan


@given(
    trunks=st.integers(1, 6), rounds=st.integers(1, 6), extra=st.integers(0, 40), off=st.booleans()
)
def test_members_are_dealt_evenly(trunks: int, rounds: int, extra: int, off: bool) -> None:
    n = trunks + max(trunks, rounds) + extra
    if off:
        assert deal_members(n, TreeConfig(rounds=0, trunks=trunks)) == [[[i]] for i in range(n)]
        return
    trees = deal_members(n, TreeConfig(rounds=rounds, trunks=trunks))
    assert [tree[0] for tree in trees] == [[trunk] for trunk in range(trunks)]
    dealt = [index for tree in trees for played in tree for index in played]
    assert sorted(dealt) == list(range(n))
    sizes = [sum(map(len, tree)) for tree in trees]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 2
    for tree in trees:
        assert all(tree) and len(tree) <= rounds + 1
        order = [index for played in tree for index in played]
        assert all(a < b for a, b in pairwise(order))


@pytest.mark.parametrize(
    ("n", "tree", "message"),
    [
        (3, TreeConfig(rounds=1, trunks=2), "rollout.n=3.*at least 4"),
        (4, TreeConfig(rounds=4, trunks=1), "rollout.n=4.*at least 5"),
        (8, TreeConfig(rounds=1, trunks=0), "trunks=0: .*at least 1"),
        (8, TreeConfig(rounds=-1), "rounds=-1.*at least 0"),
    ],
)
def test_groups_too_small_for_their_trees_are_refused(
    n: int, tree: TreeConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        deal_members(n, tree)


def test_every_state_is_drawn_with_the_same_chance() -> None:
    nodes: list[Any] = list(range(5))
    counts = Counter(choose_node(nodes, seed) for seed in range(5000))
    assert set(counts) == set(nodes)
    assert max(abs(count - 1000) for count in counts.values()) < 150  # 5 standard deviations
    assert choose_node([], 1) is None


def test_states_are_kept_once_and_only_where_somebody_may_branch() -> None:
    asked: dict[int, list[BranchPoint] | None] = {}

    def note(sample: Sample, trajectory: Trajectory) -> None:
        asked[sample.sample_index] = sample.branch_points
        if sample.branch_points is not None:
            own = [turn.index for turn in trajectory.turns if not turn.inherited]
            # A branch began at a state of its parent's, which is the parent's to give.
            expected = own if sample.branch is None else own[1:]
            assert [len(point.turns) for point in sample.branch_points] == expected
            assert {point.sample_index for point in sample.branch_points} <= {sample.sample_index}

    sample_group(8, TREE, seed=3, on_played=note)
    assert {index for index, points in asked.items() if points is None} == {5, 6, 7}
    asked.clear()
    sample_group(4, None, on_played=note)
    assert set(asked.values()) == {None}


# ------------------------------------------------------------------ refusals, the record


class WithoutStates(EchoEnv):
    snapshot = Env.snapshot
    restore = Env.restore


class OnlyTaken(EchoEnv):
    restore = Env.restore


@pytest.mark.parametrize(
    ("env", "tools", "message"),
    [
        (WithoutStates(), (), "'e' has no snapshot and no restore: .*in WithoutStates"),
        (OnlyTaken(), (), "'e' has no restore"),
        (EchoEnv(), ("python",), "has the tools python, which are no plain functions"),
    ],
)
def test_what_cannot_branch_is_refused_with_the_fix(
    env: Env, tools: Sequence[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*rollout.tree.rounds=0"):
        refuse_unbranchable(env, Toolbox(tools), env_id="e")


def test_functions_are_fine_as_tools_of_a_tree() -> None:
    refuse_unbranchable(EchoEnv(), Toolbox(["calculator"]), env_id="e")


def test_branches_come_back_from_the_record_as_they_were(tmp_path: Path) -> None:
    group = sample_group(8, TREE, kwargs=PAID, greedy=True)
    write_trajectories(tmp_path / "step_000001.jsonl", group.recorded)
    back = read_trajectories(tmp_path / "step_000001.jsonl")
    assert [t.id for t in back] == [f"train-3/{i}.0" for i in range(8)] + ["train-3/greedy.0"]
    for stored, member in zip(back, group.recorded, strict=True):
        assert (stored.parent, stored.branch_turn) == (member.parent, member.branch_turn)
        assert stored.turns == member.turns
        assert stored.total_reward == member.total_reward
