"""Composed rubrics: what a score is made of, and how a part that fails is told."""

from __future__ import annotations

import asyncio
import math
import pickle
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import ComposedRubric, Episode, Part, Score
from agentrl.errors import (
    ConfigError,
    InfrastructureError,
    RewardError,
    RewardTimeout,
    SandboxError,
    ThreadLeakError,
)
from agentrl.reward.threads import MAX_LEAKED_THREADS


def constant(value: Any):
    return lambda episode: value


async def one(episode: Episode) -> float:
    return 1.0


def score_of(rubric: ComposedRubric, episode: Episode) -> Score:
    return asyncio.run(asyncio.wait_for(rubric.score(episode), 30))


def test_the_reward_is_the_weighted_sum_and_parts_are_raw(make_episode):
    rubric = ComposedRubric(
        Part("correct", one, weight=2.0),
        Part("format", constant(0.5), weight=0.1),
        Part("length", constant(300), weight=0.0),
    )
    score = score_of(rubric, make_episode("a"))
    assert score.reward == pytest.approx(2.05)
    assert score.parts == {"correct": 1.0, "format": 0.5, "length": 300.0}
    assert score.success


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=5))
def test_any_weights_and_values_add_up(pairs):
    rubric = ComposedRubric(
        *(Part(f"p{i}", constant(value), weight=weight) for i, (weight, value) in enumerate(pairs))
    )
    episode: Any = None
    expected = sum(weight * value for weight, value in pairs)
    assert score_of(rubric, episode).reward == pytest.approx(expected)


def test_parts_run_at_the_same_time(make_episode):
    async def main() -> Score:
        met = asyncio.Event()

        async def waits(episode: Episode) -> float:
            await met.wait()
            return 1.0

        async def lets_go(episode: Episode) -> float:
            met.set()
            return 1.0

        rubric = ComposedRubric(Part("a", waits, timeout_s=10), Part("b", lets_go))
        return await rubric.score(make_episode("x"))

    assert asyncio.run(main()).reward == 2.0


def test_synchronous_parts_meet_each_other_and_the_event_loop(make_episode):
    both = threading.Barrier(2)

    def meets(episode: Episode) -> float:
        both.wait(10)
        return 1.0

    assert score_of(ComposedRubric(Part("a", meets), Part("b", meets)), make_episode()).reward == 2


def test_a_rubric_an_async_callable_and_a_function_that_returns_a_coroutine_are_parts(make_episode):
    class Rubric:
        def score(self, episode: Episode) -> Score:
            return Score(reward=1.0, success=False, parts={"inner": 7.0}, turn_rewards=(1.0,))

    class Callable:
        async def __call__(self, episode: Episode) -> float:
            return 2.0

    rubric = ComposedRubric(
        Part("rubric", Rubric(), weight=2.0), Part("callable", Callable()),
        Part("lambda", lambda episode: one(episode)),
    )  # fmt: skip
    score = score_of(rubric, make_episode("a", "b"))
    assert score.reward == 5.0
    assert score.parts == {"rubric": 1.0, "callable": 2.0, "lambda": 1.0, "inner": 7.0}
    assert score.turn_rewards == (2.0,)
    assert not score.success  # the rubric's own verdict, though its reward is positive


def test_entries_of_a_mapping_are_measured_under_the_part(make_episode):
    answer = {"score": 0.5, "acc": True, "steps": 3, "prediction": "42", "nothing": None}
    score = score_of(ComposedRubric(Part("p", constant(answer))), make_episode())
    assert score.reward == 0.5
    assert score.parts == {"p": 0.5, "p/acc": 1.0, "p/steps": 3.0}


# ------------------------------------------------------------------ success


def test_success_is_the_first_part_another_one_a_threshold_or_a_function(make_episode):
    parts = (Part("a", constant(0.0)), Part("b", constant(0.5)))
    episode = make_episode()
    assert not score_of(ComposedRubric(*parts), episode).success
    assert score_of(ComposedRubric(*parts, success="b"), episode).success
    assert not score_of(ComposedRubric(*parts, success="b", above=0.5), episode).success
    assert score_of(ComposedRubric(*parts, success="b", above=0.4), episode).success
    both = ComposedRubric(*parts, success=lambda values: values["a"] + values["b"] > 0.4)
    assert score_of(both, episode).success


def test_a_threshold_overrides_a_parts_own_verdict(make_episode):
    part = Part("a", constant(Score(reward=0.3, success=True)))
    assert score_of(ComposedRubric(part), make_episode()).success
    assert not score_of(ComposedRubric(part, above=0.5), make_episode()).success


def test_a_success_function_that_fails_or_says_no_bool_is_a_reward_error(make_episode):
    def crashes(values: Any) -> bool:
        raise KeyError("no such part")

    functions: list[Any] = [crashes, lambda values: 1.0]
    for function in functions:
        rubric = ComposedRubric(Part("a", one), success=function)
        with pytest.raises(RewardError, match="success of the reward"):
            score_of(rubric, make_episode())


# ------------------------------------------------------------------ failures


def crash(episode: Episode) -> float:
    raise ZeroDivisionError("boom")


async def crash_async(episode: Episode) -> float:
    raise ZeroDivisionError("boom")


@pytest.mark.parametrize("grader", [crash, crash_async])
def test_a_part_that_raises_is_a_reward_error_with_its_name(grader, make_episode):
    rubric = ComposedRubric(Part("fine", one), Part("broken", grader))
    with pytest.raises(RewardError, match=r"reward part 'broken'.*ZeroDivisionError: boom"):
        score_of(rubric, make_episode())


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, None, "1.0", True, [1.0], 1e30, {"score": math.nan}, {"reward": 1.0},
     {"score": 1.0, "extra": math.inf}, Score(reward=math.nan, success=True)],
    ids=repr,
)  # fmt: skip
def test_an_answer_that_is_no_finite_number_is_a_reward_error_with_the_parts_name(
    value, make_episode
):
    with pytest.raises(RewardError, match="reward part 'odd'"):
        score_of(ComposedRubric(Part("fine", one), Part("odd", constant(value))), make_episode())


def test_a_hanging_part_is_late_and_the_event_loop_goes_on(make_episode):
    release = threading.Event()
    beats = 0

    def hangs(episode: Episode) -> float:
        release.wait(60)
        return 1.0

    async def main() -> None:
        nonlocal beats

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.01)

        beating = asyncio.create_task(beat())
        rubric = ComposedRubric(Part("fine", one), Part("slow", hangs, timeout_s=0.3))
        with pytest.raises(RewardTimeout, match=r"reward part 'slow'.*timeout_s=0\.3"):
            await rubric.score(make_episode())
        beating.cancel()

    try:
        asyncio.run(asyncio.wait_for(main(), 30))
    finally:
        release.set()
    assert beats > 3


def test_an_async_part_that_ignores_its_cancelling_is_late_all_the_same(make_episode):
    async def main() -> None:
        release = asyncio.Event()

        async def stubborn(episode: Episode) -> float:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
            return 1.0

        with pytest.raises(RewardTimeout, match="'stubborn'"):
            await ComposedRubric(Part("stubborn", stubborn, timeout_s=0.1)).score(make_episode())
        release.set()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_threads_that_never_come_back_stop_the_run(make_episode):
    release = threading.Event()

    def hangs(episode: Episode) -> float:
        release.wait(60)
        return 1.0

    async def main() -> None:
        rubric = ComposedRubric(Part("slow", hangs, timeout_s=0.05))
        for _ in range(MAX_LEAKED_THREADS):
            with pytest.raises(RewardTimeout):
                await rubric.score(make_episode())
        with pytest.raises(ThreadLeakError, match="reward part 'slow'.*reward.path=./file.py"):
            await rubric.score(make_episode())

    try:
        asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        release.set()


@pytest.mark.parametrize("kind", [InfrastructureError, SandboxError])
def test_failures_that_are_ours_keep_their_kind_and_name_the_part(kind, make_episode):
    def fails(episode: Episode) -> float:
        raise kind("the server is gone")

    with pytest.raises(kind, match="reward part 'remote': the server is gone"):
        score_of(ComposedRubric(Part("remote", fails)), make_episode())


@pytest.mark.parametrize("alone", [True, False])
def test_a_part_that_raises_cancelled_error_does_not_end_the_run(alone, make_episode):
    async def cancels(episode: Episode) -> float:
        raise asyncio.CancelledError

    parts = (Part("odd", cancels),) if alone else (Part("odd", cancels), Part("fine", one))
    with pytest.raises(RewardError, match="reward part 'odd'.*CancelledError"):
        score_of(ComposedRubric(*parts), make_episode())


@pytest.mark.parametrize("kind", ["sync", "async", "lambda", "grade"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_part_that_calls_sys_exit_does_not_end_the_run(kind, alone, make_episode):
    def exits(episode: Episode) -> float:
        sys.exit(0)

    async def exits_async(episode: Episode) -> float:
        await asyncio.sleep(0)
        sys.exit(0)

    class Timed:
        async def grade(self, episode: Episode, *, timeout_s: float) -> float:
            sys.exit(0)

    graders: dict[str, Any] = {
        "sync": exits, "async": exits_async, "lambda": lambda e: exits_async(e), "grade": Timed(),
    }  # fmt: skip
    parts = [Part("odd", graders[kind]), Part("fine", one)][: 1 if alone else 2]
    with pytest.raises(RewardError, match="reward part 'odd'.*raised SystemExit"):
        score_of(ComposedRubric(*parts), make_episode())


def test_the_users_interrupt_ends_the_run_but_a_threads_does_not(make_episode):
    def raises(episode: Episode) -> float:
        raise KeyboardInterrupt

    async def interrupted(episode: Episode) -> float:
        raise KeyboardInterrupt

    with pytest.raises(RewardError, match="reward part 'odd'.*raised KeyboardInterrupt"):
        score_of(ComposedRubric(Part("odd", raises)), make_episode())
    with pytest.raises(KeyboardInterrupt):
        score_of(ComposedRubric(Part("odd", interrupted)), make_episode())


def test_cancelling_the_grading_cancels_the_parts(make_episode):
    async def main() -> list[str]:
        log: list[str] = []
        begun = asyncio.Event()

        async def waits(episode: Episode) -> float:
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                log.append("ended")
            return 1.0

        grading = asyncio.create_task(
            ComposedRubric(Part("a", waits), Part("b", waits)).score(make_episode())
        )
        await begun.wait()
        await asyncio.sleep(0)
        grading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await grading
        return log

    assert asyncio.run(asyncio.wait_for(main(), 30)) == ["ended", "ended"]


def test_two_parts_that_measure_the_same_name_are_an_error(make_episode):
    nested = Score(reward=1.0, success=True, parts={"a": 1.0})
    rubric = ComposedRubric(Part("a", one), Part("b", constant(nested)))
    with pytest.raises(RewardError, match="'b' measures 'a'.*rename"):
        score_of(rubric, make_episode())


# ------------------------------------------------------------------ refused at once


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ComposedRubric(), "at least one part"),
        (lambda: ComposedRubric(one), "Part\\(name, grader\\)"),  # pyright: ignore
        (lambda: ComposedRubric(Part("a", one), Part("a", one)), "'a' stands there twice"),
        (lambda: ComposedRubric(Part("outcome", one)), "'outcome': algo.reward_weights means"),
        (lambda: ComposedRubric(Part("a", one), Part("turn", one)), "give the part another name"),
        (lambda: ComposedRubric(Part("tool", one)), "'tool'"),
        (lambda: ComposedRubric(Part("a", one), success="b"), "the parts are: a"),
        (
            lambda: ComposedRubric(Part("a", one), success=lambda v: True, above=1.0),
            "not both",
        ),
        (lambda: Part("a", 3), "function of the episode"),  # pyright: ignore
        (lambda: Part("a", Score), "function of the episode"),  # pyright: ignore
        (lambda: Part("", one), "needs a name"),
        (lambda: Part("a", one, weight=math.nan), "'a', weight"),
        (lambda: Part("a", one, timeout_s=0), "timeout_s=0"),
    ],
)
def test_what_cannot_grade_is_refused_when_it_is_made(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_rubric_travels_to_the_process_of_an_environment():
    rubric = ComposedRubric(Part("a", crash_async), success="a", above=0.5)
    copy = pickle.loads(pickle.dumps(rubric))
    assert [part.name for part in copy.parts] == ["a"]
