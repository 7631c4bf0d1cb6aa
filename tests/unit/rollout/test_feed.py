"""The feed of prompts: what a curriculum makes of the stream, and that a resumed one goes on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import CheckpointError, ConfigError, RegistryError, TrainingError
from agentrl.rollout.buffer import Lookahead, RolloutBuffer, Verdict
from agentrl.rollout.curriculum import Curriculum, SuccessBand, curriculum_registry
from agentrl.rollout.feed import TaskFeed
from agentrl.rollout.mix import MixedStream
from agentrl.rollout.producer import Producer
from agentrl.rollout.tasks import Dispatch, TaskStream
from agentrl.testing.sessions import make_session
from agentrl.train.state_file import check_storable
from agentrl.types import Task, TrajectoryGroup

TASKS = [Task(id=f"t{index}", data={"n": index}) for index in range(12)]
PER_STEP = 3


def stream(tasks: list[Task] = TASKS, seed: int = 0) -> TaskStream:
    return TaskStream(tasks, seed=seed, source="t")


def finished(dispatch: Dispatch, *rewards: float | None) -> TrajectoryGroup:
    """A group of one session per reward; None is a failure of ours."""
    return TrajectoryGroup(
        id=str(dispatch.index),
        task=dispatch.task,
        env_id="e",
        trajectories=[make_session(f"s{i}", reward) for i, reward in enumerate(rewards)],
        policy_version=0,
        index=dispatch.index,
    )


class Never:
    """A curriculum that wants nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.heard: list[tuple[str, float]] = []

    def accept(self, task: Task, *, key: str, epoch: int) -> bool:
        self.asked.append((key, epoch))
        return False

    def update(self, key: str, success_rate: float) -> None:
        self.heard.append((key, success_rate))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def test_without_a_curriculum_the_stream_comes_as_it_is() -> None:
    feed = TaskFeed(stream(), facts={"data/dropped_long": 3})
    expected = list(islice(stream().starting_at(5), 30))
    assert list(islice(feed.starting_at(5), 30)) == expected
    assert feed.metrics() == {"data/dropped_long": 3, "data/epoch": 0}
    feed.observe([finished(expected[-1], 1.0)])
    assert feed.metrics()["data/epoch"] == 2


@given(max_skips=st.integers(1, 40), count=st.integers(1, 20))
def test_a_curriculum_that_wants_nothing_starves_nobody(max_skips: int, count: int) -> None:
    feed = TaskFeed(stream(), curriculum=Never(), max_skips=max_skips)
    indices = [dispatch.index for dispatch in islice(feed.starting_at(0), count)]
    assert indices == [max_skips + k * (max_skips + 1) for k in range(count)]
    found = feed.metrics()
    assert found["curriculum/skipped"] == count * max_skips
    assert found["curriculum/forced"] == count
    assert feed.metrics()["curriculum/skipped"] == 0, "counted once"


def test_the_curriculum_hears_of_success_without_failures_of_ours() -> None:
    curriculum = Never()
    feed = TaskFeed(stream(), curriculum=curriculum, max_skips=1)
    one, two, three = islice(feed.starting_at(0), 3)
    feed.observe(
        [finished(one, 1.0, 0.0, None, 1.0), finished(two, None, None), finished(three, 0.0)]
    )
    assert curriculum.heard == [(one.task.id, 2 / 3), (three.task.id, 0.0)]


def test_a_curriculum_that_raises_is_named() -> None:
    class Broken(Never):
        def accept(self, task: Task, *, key: str, epoch: int) -> bool:
            return bool(1 / self.divisor)

        def update(self, key: str, success_rate: float) -> None:
            raise KeyError(key)

        divisor = 0

    broken = Broken()
    feed = TaskFeed(stream(), curriculum=broken)
    with pytest.raises(TrainingError, match="curriculum Broken: accept raised ZeroDivisionError"):
        next(feed.starting_at(0))
    broken.divisor = 1
    first = next(feed.starting_at(0))
    with pytest.raises(TrainingError, match="curriculum Broken: update raised KeyError"):
        feed.observe([finished(first, 1.0)])


class Mode(Never):
    """A curriculum of which one method ends in some way."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__()
        self.method, self.error = method, error

    def _end(self, method: str) -> None:
        if method == self.method:
            raise self.error

    def accept(self, task: Task, *, key: str, epoch: int) -> bool:
        self._end("accept")
        return True

    def update(self, key: str, success_rate: float) -> None:
        self._end("update")

    def state_dict(self) -> dict[str, Any]:
        self._end("state_dict")
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._end("load_state_dict")


@pytest.mark.parametrize("method", ["accept", "update", "state_dict", "load_state_dict"])
@pytest.mark.parametrize(
    "error", [SystemExit(0), asyncio.CancelledError(), KeyError("x"), StopIteration()]
)
def test_no_ending_of_a_curriculum_passes_for_the_end_of_the_run(
    method: str, error: BaseException
) -> None:
    feed = TaskFeed(stream(), curriculum=Mode(method, error))
    with pytest.raises(TrainingError, match=f"Mode: {method} raised {type(error).__name__}"):
        feed.observe([finished(next(feed.starting_at(0)), 1.0)])
        feed.load_state_dict(feed.state_dict())


def test_a_state_that_fills_with_what_cannot_be_stored_is_refused_after_the_first_step() -> None:
    class Filling(Never):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": dict.fromkeys(self.heard)}  # keys that are tuples

    feed = TaskFeed(stream(), curriculum=Filling(), max_skips=1, check_storable=check_storable)
    feed.check_state()
    first = next(feed.starting_at(0))
    with pytest.raises(TrainingError, match=r"Filling: its state_dict cannot be stored.*the key"):
        feed.observe([finished(first, 1.0)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": None}, "the checkpoint's feed lacks tasks"),
        ({"epoch": None, "epok": 1}, "feed lacks epoch, has the unknown epok"),
        ({"epoch": -1}, "feed.epoch=-1, not a number of epochs"),
        ({"epoch": "1"}, "feed.epoch='1', not a number of epochs"),
    ],
)
def test_a_state_that_cannot_be_right_is_refused(change: dict[str, Any], message: str) -> None:
    state = TaskFeed(stream()).state_dict() | change
    state = {key: value for key, value in state.items() if value is not None or key not in change}
    with pytest.raises(CheckpointError, match=message):
        TaskFeed(stream()).load_state_dict(state)


def test_tasks_of_several_environments_are_told_apart() -> None:
    curriculum = Never()
    mixed = MixedStream({"a": stream(), "b": stream()}, {"a": 1.0, "b": 1.0})
    feed = TaskFeed(mixed, curriculum=curriculum, max_skips=1)
    given = list(islice(feed.starting_at(0), 2))
    feed.observe([finished(dispatch, 1.0) for dispatch in given])
    assert [key for key, _ in curriculum.heard] == [f"{d.env}/{d.task.id}" for d in given]


def ask(band: SuccessBand, key: str, times: int = 1) -> list[bool]:
    task = Task(id=key, data={})
    return [band.accept(task, key=key, epoch=epoch) for epoch in range(times)]


def test_the_band_skips_what_is_too_easy_or_too_hard_and_tries_it_again() -> None:
    band = SuccessBand(low=0.25, high=0.75, revisit_after=3)
    for key, rate in {"easy": 1.0, "hard": 0.0, "low": 0.25, "high": 0.75}.items():
        assert ask(band, key) == [True], "never sampled before"
        band.update(key, rate)
    again = [False, False, False, True, False, False, False, True]
    assert ask(band, "easy", 8) == ask(band, "hard", 8) == again
    assert ask(band, "low", 4) == ask(band, "high", 4) == [True] * 4
    band.update("hard", 0.5)
    assert ask(band, "hard", 3) == [True] * 3, "it has become feasible"


def test_the_band_averages_over_its_window() -> None:
    band = SuccessBand(low=0.4, high=0.6, window=2)
    band.update("a", 1.0)
    assert ask(band, "a") == [False]
    band.update("a", 0.0)
    assert ask(band, "a") == [True]
    band.update("a", 0.0)
    assert ask(band, "a") == [False], "the first one has left the window"


@given(
    rates=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1)), max_size=30),
    revisit_after=st.integers(1, 4),
)
def test_no_task_is_skipped_more_often_in_a_row_than_stated(
    rates: list[tuple[str, float]], revisit_after: int
) -> None:
    band = SuccessBand(revisit_after=revisit_after)
    for key, rate in rates:
        band.update(key, rate)
        assert any(ask(band, key, revisit_after + 1))


@pytest.mark.parametrize(
    "kwargs",
    [{"low": -0.1}, {"high": 1.1}, {"low": 0.8, "high": 0.2}, {"window": 0}, {"revisit_after": 0}],
)
def test_numbers_that_make_no_band_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="want 0 <= low <= high <= 1"):
        SuccessBand(**kwargs)


def test_the_band_is_registered_and_refuses_anothers_state() -> None:
    assert curriculum_registry.get("success_band") is SuccessBand
    with pytest.raises(RegistryError, match="unknown curriculum 'sucess_band'; did you mean"):
        curriculum_registry.get("sucess_band")
    with pytest.raises(CheckpointError, match="the parts .'mine'., which success_band"):
        SuccessBand().load_state_dict({"mine": 1})


class Run:
    """Synchronous training reduced to its feed: which tasks are played, in which step."""

    def __init__(self, seed: int, curriculum: Curriculum | None) -> None:
        self.seed = seed
        self.feed = TaskFeed(stream(seed=seed), curriculum=curriculum, fingerprint="f", max_skips=4)
        self.step = self.cursor = 0
        self.played: list[tuple[int, list[str]]] = []

    async def play(self, dispatch: Dispatch) -> TrajectoryGroup:
        rng = random.Random(f"{self.seed}:{self.step}:{dispatch.index}")
        for _ in range(rng.randrange(4)):  # groups come back in any order
            await asyncio.sleep(0)
        failed = rng.random() < 0.2
        return finished(dispatch, *([None] if failed else rng.choices((0.0, 1.0), k=2)))

    def judge(self, group: TrajectoryGroup) -> Verdict:
        if all(trajectory.failed for trajectory in group.trajectories):
            return Verdict.FAILED
        return Verdict.NO_SIGNAL if group.index % 5 == 0 else Verdict.TRAINABLE

    async def until(self, step: int) -> None:
        buffer = RolloutBuffer(Lookahead(prompts_per_step=PER_STEP), version=self.step)
        producer = Producer(self.feed, buffer, self.play, self.judge)
        async with asyncio.timeout(30), producer.running(start=self.cursor):
            while self.step < step:
                groups = await buffer.take(PER_STEP, timeout_s=20, max_rejected=99, max_refills=2)
                self.cursor = groups[-1].index + 1
                self.feed.observe(groups)
                self.step += 1
                self.played.append((self.cursor, [group.task.id for group in groups]))
                for _ in range(5):  # what a producer would do too early, it does here
                    await asyncio.sleep(0)
                if self.step < step:
                    await buffer.advance(version=self.step)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), halt=st.integers(1, 7), revisit_after=st.integers(1, 3))
def test_a_resumed_run_plays_what_an_unbroken_one_does(
    seed: int, halt: int, revisit_after: int
) -> None:
    def band() -> SuccessBand:
        return SuccessBand(low=0.3, high=0.7, revisit_after=revisit_after)

    whole = Run(seed, band())
    asyncio.run(whole.until(8))
    first = Run(seed, band())
    asyncio.run(first.until(halt))
    second = Run(seed, band())
    second.step, second.cursor = first.step, first.cursor
    second.feed.load_state_dict(json.loads(json.dumps(first.feed.state_dict())))
    asyncio.run(second.until(8))
    assert first.played + second.played == whole.played
    assert second.feed.state_dict() == whole.feed.state_dict()


def test_a_band_plays_fewer_of_the_tasks_that_it_skips() -> None:
    tasks = [Task(id=f"t{index}", data={"rate": index % 2}) for index in range(20)]
    feed = TaskFeed(stream(tasks), curriculum=SuccessBand(revisit_after=3), max_skips=100)
    played = {0: 0, 1: 0}
    for dispatch in islice(feed.starting_at(0), 200):
        played[dispatch.task.data["rate"]] += 1
        # Odd tasks are solved half the time, even ones never.
        feed.observe(
            [finished(dispatch, *((0.0, 1.0) if dispatch.task.data["rate"] else (0.0, 0.0)))]
        )
    assert 3 < played[1] / played[0] < 5


def test_other_tasks_than_those_of_the_run_are_refused() -> None:
    state = TaskFeed(stream(), fingerprint="a").state_dict()
    feed = TaskFeed(stream(), fingerprint="b")
    with pytest.raises(CheckpointError, match="tasks are not those .* trainer.force_resume"):
        feed.load_state_dict(state)
    feed.load_state_dict(state, check_tasks=False)
    feed.load_state_dict({})


def test_the_curriculum_of_the_page_keeps_the_protocol() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    (code,) = (b.split("```")[0] for b in page.split("```python\n")[1:] if "class Mine" in b)
    names: dict[str, Any] = {}
    exec(code, names)
    curriculum = names["Mine"](floor=0.5)
    feed = TaskFeed(stream(), curriculum=curriculum)
    first = list(islice(feed.starting_at(0), len(TASKS)))
    feed.observe([finished(dispatch, dispatch.task.data["n"] % 2) for dispatch in first])
    second = list(islice(feed.starting_at(len(TASKS)), len(TASKS) // 2))
    assert all(dispatch.task.data["n"] % 2 for dispatch in second)
    again = TaskFeed(stream(), curriculum=names["Mine"](floor=0.5))
    again.load_state_dict(json.loads(json.dumps(feed.state_dict())))
    assert list(islice(again.starting_at(len(TASKS)), len(second))) == second
