from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import DataError, EnvError, EnvTimeout
from agentrl.rollout.tasks import TaskStream, check_disjoint, check_tasks, read_split
from agentrl.types import Task


def tasks(count: int, prefix: str = "t") -> list[Task]:
    return [Task(id=f"{prefix}{index}", data={"n": f"{prefix}{index}"}) for index in range(count)]


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


def test_the_same_content_under_another_id_is_refused() -> None:
    trained = [Task(id="a", data={"x": 1, "y": [2]}), Task(id="b", data={"x": 2})]
    check_disjoint(trained, [Task(id="v", data={"x": 3})], split="val")
    with pytest.raises(DataError, match=r"1 tasks of split 'val'.*by data.*'v'"):
        check_disjoint(trained, [Task(id="v", data={"y": [2], "x": 1})], split="val")


@pytest.mark.parametrize(
    "split",
    [3, None, "abc", {"a": 1}, {1}, (t for t in tasks(2)), iter([])],
    ids=lambda value: type(value).__name__,
)
def test_a_split_that_is_no_sequence_is_an_environment_error(split: Any) -> None:
    class Env:
        def tasks(self, name: str) -> Any:
            return split

    with pytest.raises(EnvError, match=r"'mine': tasks\('val'\).*sequence of Task, got"):
        read_split(Env(), "val", env_id="mine")
    with pytest.raises(EnvError, match="must be a sequence"):
        check_tasks(split, source="x")


@pytest.mark.parametrize("failure", [ValueError("no"), SystemExit(0), KeyError("train")])
def test_a_split_that_raises_is_an_environment_error(failure: BaseException) -> None:
    class Env:
        def tasks(self, name: str) -> Any:
            raise failure

    with pytest.raises(
        EnvError, match=rf"'mine': tasks\('train'\) raised {type(failure).__name__}"
    ):
        read_split(Env(), "train", env_id="mine")


def test_a_split_that_never_comes_is_an_environment_error() -> None:
    never = threading.Event()

    class Env:
        def tasks(self, name: str) -> Any:
            return never.wait()

    with pytest.raises(
        EnvTimeout,
        match=r"'mine': tasks\('test'\) did not return within 0.05 s; .*env.tasks_timeout_s",
    ):
        read_split(Env(), "test", env_id="mine", timeout_s=0.05)
    never.set()


def broken(**fields: Any) -> Task:
    return Task(**{"id": "t", "data": {}, **fields})


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"id": "a"}, "a dict"),
        (None, "a NoneType"),
        (broken(id=3), "id is a int"),
        (broken(id=""), "id of 0 characters"),
        (broken(id="x" * 501), "id of 501 characters"),
        (broken(id="\ud800"), "not valid UTF-8"),
        (broken(data=None), "data is a NoneType"),
        (broken(data=[1]), "data is a list"),
        (broken(tags=None), "tags are a NoneType"),
        (broken(tags={"level": 1}), "tags that are not text"),
    ],
)
def test_an_item_that_is_no_sound_task_is_an_environment_error(item: Any, message: str) -> None:
    with pytest.raises(EnvError, match=f"mine train: the split holds .*{message}"):
        check_tasks([*tasks(2), item], source="mine train")


def test_a_generated_task_that_was_not_looked_at_is_checked_when_it_comes() -> None:
    class Rotten(Generated):
        def __getitem__(self, index):  # type: ignore[override]
            return super().__getitem__(index) if index % 2 == 0 else None

    stream = TaskStream(Rotten(1_000_000), seed=0, source="mine train")
    with pytest.raises(EnvError, match="mine train: the split holds a NoneType"):
        for index in range(100):
            stream.at(index)


def test_a_sequence_that_cannot_make_its_tasks_is_an_environment_error() -> None:
    class Short(Generated):
        def __getitem__(self, index):  # type: ignore[override]
            raise IndexError(index)

    with pytest.raises(EnvError, match="x: a task cannot be read: IndexError"):
        check_tasks(Short(3), source="x")
