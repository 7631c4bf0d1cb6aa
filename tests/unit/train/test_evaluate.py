"""Held-out evaluation of several environments: each by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.errors import TrainingError
from agentrl.rollout.tasks import Dispatch
from agentrl.testing.run_data import make_trajectory
from agentrl.testing.virtual_time import run_virtual
from agentrl.train.evaluate import Evaluator, choose_tasks
from agentrl.types import StopReason, Task, Trajectory, TrajectoryGroup


def tasks(count: int) -> list[Task]:
    """Ids that are the same in every environment."""
    return [Task(id=str(index), data={}) for index in range(count)]


def evaluator(
    by_split: dict[str, dict[str, list[Task]]],
    *,
    broken: str = "",
    every: int = 5,
    seconds: Callable[[int], float] = lambda index: 0.0,
) -> tuple[Evaluator, list[tuple[str, Dispatch]]]:
    """Return one in which ``good`` solves everything, and what it was asked to sample."""
    asked: list[tuple[str, Dispatch]] = []

    async def run_group(split: str, dispatch: Dispatch) -> TrajectoryGroup:
        asked.append((split, dispatch))
        await asyncio.sleep(seconds(dispatch.index))
        member = make_trajectory(
            seed=dispatch.index,
            env_id=dispatch.env,
            task=dispatch.task,
            success=dispatch.env == "good",
            stop_reason=StopReason.ENV_ERROR if dispatch.env == broken else StopReason.TERMINATED,
        )
        return TrajectoryGroup(
            id=f"{dispatch.env}{dispatch.index}",
            task=dispatch.task,
            env_id=dispatch.env,
            trajectories=[member],
            policy_version=0,
        )

    one = Evaluator(run_group, by_split, every=every, total_steps=10, stall_timeout_s=60.0)
    return one, asked


def run(one: Evaluator, *splits: str) -> tuple[dict[str, Any], list[Trajectory]]:
    return asyncio.run(one.run(splits, step=0))


def test_environments_are_measured_apart_although_their_tasks_share_ids() -> None:
    one, asked = evaluator({"val": {"good": tasks(3), "bad": tasks(2)}, "test": {}})
    metrics, trajectories = run(one, "val")
    assert metrics["val/good/success"] == 1.0 and metrics["val/good/tasks"] == 3
    assert metrics["val/bad/success"] == 0.0 and metrics["val/bad/tasks"] == 2
    assert len(trajectories) == 5
    named = [(split, dispatch.env, dispatch.index) for split, dispatch in asked]
    assert sorted(named) == sorted(
        [("val", "good", i) for i in range(3)] + [("val", "bad", i) for i in range(2)]
    )


def test_an_environment_without_the_split_is_left_out_and_a_split_without_any_is_not_due() -> None:
    one, _ = evaluator({"val": {"good": tasks(1), "bad": []}, "test": {"good": [], "bad": []}})
    assert one.due(0) == ["val"]
    metrics, _ = run(one, "val")
    assert not any("bad" in key for key in metrics)


def test_one_broken_environment_is_named_and_not_hidden_by_the_others() -> None:
    one, _ = evaluator({"val": {"good": tasks(9), "bad": tasks(1)}, "test": {}}, broken="bad")
    with pytest.raises(TrainingError, match=r"evaluation of 'bad' on 'val'.*1 of 1 episodes"):
        run(one, "val")


def test_val_at_its_steps_and_test_before_and_after() -> None:
    one, _ = evaluator({"val": {"good": tasks(1)}, "test": {"good": tasks(1)}})
    assert [one.due(step) for step in (0, 3, 5, 10)] == [
        ["val", "test"],
        [],
        ["val"],
        ["val", "test"],
    ]
    val: dict[str, dict[str, list[Task]]] = {"val": {"good": tasks(1)}, "test": {}}
    assert [evaluator(val, every=4)[0].due(step) for step in (8, 9, 10)] == [["val"], [], ["val"]]
    assert [evaluator(val, every=0)[0].due(step) for step in (0, 10)] == [[], []]
    assert len(choose_tasks(tasks(5), 2)) == 2 and len(choose_tasks(tasks(5), 0)) == 5


def test_an_evaluation_may_take_as_long_as_it_goes_on_and_ends_where_it_stands_still() -> None:
    by_split: dict[str, dict[str, list[Task]]] = {"val": {"good": tasks(9)}, "test": {}}
    slow, _ = evaluator(by_split, seconds=lambda index: 50.0 * index)
    metrics, _ = run_virtual(slow.run(["val"], step=0))
    assert metrics["val/good/tasks"] == 9
    stuck, _ = evaluator(by_split, seconds=lambda index: 50.0 * index if index < 8 else 1e6)
    with pytest.raises(TrainingError, match=r"'val' stands still: of 9 tasks 8 .*timeout_s=60 s"):
        run_virtual(stuck.run(["val"], step=0))
