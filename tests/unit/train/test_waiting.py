"""A line of groups in a checkpoint: what is finished comes back whole, the rest by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agentrl.algo.config import CreditConfig
from agentrl.errors import CheckpointError
from agentrl.rollout.buffer import Lookahead, Slot, Verdict
from agentrl.rollout.feed import TaskFeed
from agentrl.rollout.tasks import TaskStream
from agentrl.testing.run_data import make_trajectory
from agentrl.train.assemble import assemble
from agentrl.train.checkpoint import CheckpointStore
from agentrl.train.manifest import verify
from agentrl.train.waiting import FOLDER, read_waiting, waiting_part
from agentrl.types import StopReason, Task, TrajectoryGroup

TASKS = [Task(id=f"t{index}", data={"secret": {1, 2}}) for index in range(5)]  # no JSON
RULES = Lookahead(prompts_per_step=2, max_staleness=1)


def feed(tasks: list[Task] = TASKS) -> TaskFeed:
    return TaskFeed(TaskStream(tasks, seed=3, source="t"))


def line_of(source: TaskFeed) -> list[Slot]:
    """A finished group, an unfinished one, and one that was given up with a retry."""
    line = [Slot(4, source.again(8)), Slot(4, source.again(9)), Slot(5, source.again(10))]
    for number, verdict in ((0, Verdict.TRAINABLE), (2, Verdict.FAILED)):
        slot = line[number]
        assert slot.dispatch is not None
        members = [
            make_trajectory(seed=number * 10 + i, task=slot.dispatch.task, policy_version=4)
            for i in range(2)
        ]
        members[0].segments[0].logprobs[:] = np.float32(1 / 3)
        slot.group = TrajectoryGroup(
            id=f"train-{slot.dispatch.index}",
            task=slot.dispatch.task,
            env_id="code_sandbox",
            trajectories=members,
            policy_version=4,
            index=slot.dispatch.index,
            discarded=[make_trajectory(seed=77, stop_reason=StopReason.ENV_ERROR)] * number,
            baseline=make_trajectory(seed=78) if number else None,
            gave_up=verdict is Verdict.FAILED,
        )
        slot.verdict = verdict
    return line


def saved(folder: Path, line: list[Slot]) -> Path:
    (part,) = waiting_part(line).values()
    (folder / FOLDER).mkdir(parents=True)
    part.save(folder / FOLDER).wait()
    return folder


def test_a_line_comes_back_as_it_was_and_trains_the_same(tmp_path: Path) -> None:
    line = line_of(feed())
    found = read_waiting(saved(tmp_path, line), feed(), RULES, step=5)
    assert [slot.version for slot in found] == [4, 4, 5]
    assert [slot.verdict for slot in found] == [Verdict.TRAINABLE, None, Verdict.FAILED]
    assert [slot.dispatch for slot in found] == [slot.dispatch for slot in line]
    for slot, back in zip(line, found, strict=True):
        if slot.group is None:
            assert back.group is None
            continue
        assert back.group is not None and back.group.task == slot.group.task
        assert back.group.gave_up == slot.group.gave_up
        assert len(back.group.discarded) == len(slot.group.discarded)
        assert (back.group.baseline is None) == (slot.group.baseline is None)
        configs = {"code_sandbox": CreditConfig()}
        want, got = (assemble([item], configs) for item in (slot.group, back.group))
        assert [t.id for t in got.sessions] == [t.id for t in want.sessions]
        assert got.credit.outcome_rewards.equal(want.credit.outcome_rewards)
        assert got.credit.turn_rewards.equal(want.credit.turn_rewards)
        if want.batch is not None and got.batch is not None:
            for name, value in want.batch.tokens.items():
                assert got.batch.tokens[name].equal(value), name


def test_the_feed_hears_of_what_was_waiting_when_it_is_trained(tmp_path: Path) -> None:
    again = feed()
    found = read_waiting(saved(tmp_path, line_of(feed())), again, RULES, step=5)
    group = found[0].group
    assert group is not None
    again.observe([group])
    assert again.metrics()["data/epoch"] == 1, "prompt 8 of 5 tasks is one of the second epoch"


def test_what_finishes_after_a_snapshot_is_not_in_it(tmp_path: Path) -> None:
    line = line_of(feed())
    (part,) = waiting_part(line).values()
    line[1].group, line[1].verdict = line[0].group, Verdict.TRAINABLE
    (tmp_path / FOLDER).mkdir()
    part.save(tmp_path / FOLDER).wait()
    assert read_waiting(tmp_path, feed(), RULES, step=5)[1].group is None


def test_an_empty_line_leaves_no_files_and_none_are_wanted(tmp_path: Path) -> None:
    assert waiting_part([]) == {}
    assert read_waiting(tmp_path, feed(), RULES, step=5) == []


def test_a_line_that_would_be_trained_too_late_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, line_of(feed()))
    with pytest.raises(
        CheckpointError, match=r"group 8 .*version 4, .*at version 6: .*staleness=1"
    ):
        read_waiting(folder, feed(), RULES, step=6)
    tight = Lookahead(prompts_per_step=1, max_staleness=1)
    with pytest.raises(CheckpointError, match=r"version 4, would be trained at version 6"):
        read_waiting(folder, feed(), tight, step=5)


def test_a_group_of_a_task_that_was_changed_is_played_again(tmp_path: Path) -> None:
    folder = saved(tmp_path, line_of(feed()))
    others = [Task(id=f"other{index}", data={}) for index in range(5)]
    found = read_waiting(folder, feed(others), RULES, step=5)
    assert [slot.group for slot in found] == [None, None, None]


@pytest.mark.parametrize("name", ["line.json", "trajectories.tokens.safetensors"])
def test_damage_is_found_by_checksum_and_by_reading(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", config={})
    store.save(5, waiting_part(line_of(feed())), {}, score=None)
    store.flush()
    folder = tmp_path / "checkpoints" / "step_000005"
    verify(folder)
    path = folder / FOLDER / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=name):
        verify(folder)
    with pytest.raises(CheckpointError, match=r"that wait .*resume from another one"):
        read_waiting(folder, feed(), RULES, step=5)
