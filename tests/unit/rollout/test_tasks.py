from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.rollout.tasks import TaskStream, check_disjoint
from agentrl.types import Task


def tasks(count: int, prefix: str = "t") -> list[Task]:
    return [Task(id=f"{prefix}{index}", data={}) for index in range(count)]


@given(count=st.integers(1, 20), seed=st.integers(0, 2**32), epochs=st.integers(1, 3))
def test_every_epoch_holds_every_task_once(count: int, seed: int, epochs: int) -> None:
    stream = TaskStream(tasks(count), seed=seed, source="test")
    for epoch in range(epochs):
        dispatches = [stream.at(epoch * count + offset) for offset in range(count)]
        assert sorted(d.task.id for d in dispatches) == sorted(t.id for t in tasks(count))
        assert {d.epoch for d in dispatches} == {epoch}


@given(index=st.integers(0, 200), seed=st.integers(0, 100))
def test_a_position_means_the_same_task_however_it_is_reached(index: int, seed: int) -> None:
    direct = TaskStream(tasks(7), seed=seed, source="test").at(index)
    walked = TaskStream(tasks(7), seed=seed, source="test").starting_at(max(0, index - 5))
    assert direct in [next(walked) for _ in range(6)]


def test_the_order_depends_on_the_seed_and_changes_between_epochs() -> None:
    one = [TaskStream(tasks(50), seed=1, source="t").at(i).task.id for i in range(100)]
    two = [TaskStream(tasks(50), seed=2, source="t").at(i).task.id for i in range(100)]
    assert one[:50] != two[:50]
    assert one[:50] != one[50:]


def test_no_tasks_are_refused_by_name() -> None:
    with pytest.raises(DataError, match="guess_number train: no tasks"):
        TaskStream([], seed=0, source="guess_number train")


def test_repeated_ids_are_refused_with_the_ids() -> None:
    with pytest.raises(DataError, match=r"1 task ids occur more than once.*t0"):
        TaskStream([*tasks(3), *tasks(1)], seed=0, source="x")


def test_evaluation_tasks_that_are_trained_on_are_refused() -> None:
    check_disjoint(tasks(3), tasks(3, "v"), split="val")
    with pytest.raises(DataError, match=r"2 tasks of split 'val'.*t0"):
        check_disjoint(tasks(3), tasks(2), split="val")


class Generated(Sequence[Task]):
    """Counts how many tasks are made."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_made = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index):  # type: ignore[override]
        self.num_made += 1
        return Task(id=str(index), data={})


def test_a_generated_split_of_a_million_tasks_is_not_made_to_be_checked() -> None:
    generated = Generated(1_000_000)
    stream = TaskStream(generated, seed=0, source="x")
    stream.at(5)
    assert generated.num_made < 3_000
