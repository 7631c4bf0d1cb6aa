from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.bench.count_lines import count_lines
from agentrl.errors import TrainingError
from agentrl.rollout.buffer import Lookahead, RolloutBuffer, Slot, Verdict
from agentrl.types import Task, TrajectoryGroup

T = TypeVar("T")
DEADLINE_S = 20.0


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(bounded())


def group(index: int, version: int = 0) -> TrajectoryGroup:
    return TrajectoryGroup(
        id=str(index),
        task=Task(id=str(index), data={}),
        env_id="e",
        trajectories=[],
        policy_version=version,
        index=index,
    )


async def never(coroutine: Coroutine[Any, Any, Any]) -> bool:
    """Whether the coroutine is still waiting when the loop has nothing else to do."""
    task = asyncio.create_task(coroutine)
    for _ in range(20):
        await asyncio.sleep(0)
    waiting = not task.done()
    task.cancel()
    return waiting


def test_groups_leave_in_order_of_dispatch_whatever_the_order_of_arrival() -> None:
    async def scenario() -> list[str]:
        buffer = RolloutBuffer(Lookahead(prompts_per_step=3))
        slots = [await buffer.reserve() for _ in range(3)]
        for index in (2, 0, 1):
            await buffer.fill(slots[index], group(index), verdict=Verdict.TRAINABLE)
        return [taken.id for taken in await buffer.take(3, timeout_s=5, max_rejected=99)]

    assert run(scenario()) == ["0", "1", "2"]


def test_synchronous_budget_is_one_step_until_the_next_version() -> None:
    async def scenario() -> None:
        buffer = RolloutBuffer(Lookahead(prompts_per_step=2))
        slots = [await buffer.reserve() for _ in range(2)]
        assert await never(buffer.reserve())
        for index, slot in enumerate(slots):
            await buffer.fill(slot, group(index), verdict=Verdict.TRAINABLE)
        await buffer.take(2, timeout_s=5, max_rejected=99)
        assert await never(buffer.reserve()), "taking alone must not free the budget"
        await buffer.advance(version=1)
        await buffer.reserve()
        await buffer.reserve()
        assert await never(buffer.reserve())

    run(scenario())


def test_an_untrainable_group_gives_its_place_back_and_is_returned_as_data() -> None:
    async def scenario() -> None:
        buffer = RolloutBuffer(Lookahead(prompts_per_step=1))
        first = await buffer.reserve()
        taking = asyncio.create_task(buffer.take(1, timeout_s=5, max_rejected=99))
        await buffer.fill(first, group(0), verdict=Verdict.FAILED)
        second = await buffer.reserve()  # deadlocks if the place is not given back
        await buffer.fill(second, group(1), verdict=Verdict.TRAINABLE)
        assert [taken.id for taken in await taking] == ["0", "1"]
        assert buffer.num_rejected == 1

    run(scenario())


def test_a_reservation_wakes_a_taker_that_came_first() -> None:
    async def scenario() -> None:
        buffer = RolloutBuffer(Lookahead(prompts_per_step=1))
        taking = asyncio.create_task(buffer.take(1, timeout_s=5, max_rejected=99))
        await asyncio.sleep(0)
        slot = await buffer.reserve()
        await buffer.fill(slot, group(0), verdict=Verdict.TRAINABLE)
        assert len(await taking) == 1

    run(scenario())


def test_a_late_step_says_what_was_missing_and_how_to_fix_it() -> None:
    async def scenario() -> None:
        buffer = RolloutBuffer(Lookahead(prompts_per_step=2))
        slot = await buffer.reserve()
        await buffer.reserve()
        await buffer.fill(slot, group(0), verdict=Verdict.TRAINABLE)
        await buffer.take(2, timeout_s=0.05, max_rejected=99)

    with pytest.raises(TrainingError, match=r"only 1 of 2 .*1 dispatched.*collect_timeout_s"):
        run(scenario())


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (
            Verdict.NO_SIGNAL,
            r"only 0 of 2 .*; 3 more were ready, had no signal and were replaced; lower "
            r"algo.groups.max_refills",
        ),
        (Verdict.FAILED, r"only 0 of 2 .*; 3 more failed and were replaced; look at the errors"),
    ],
)
def test_a_late_step_tells_of_groups_that_were_ready_and_replaced(
    verdict: Verdict, message: str
) -> None:
    async def scenario() -> None:
        buffer = RolloutBuffer(Lookahead(prompts_per_step=2))

        async def produce() -> None:
            for index in range(3):
                await buffer.fill(await buffer.reserve(), group(index), verdict=verdict)

        producing = asyncio.create_task(produce())
        try:
            await buffer.take(2, timeout_s=0.1, max_rejected=99, max_refills=99)
        finally:
            producing.cancel()

    with pytest.raises(TrainingError, match=message) as caught:
        run(scenario())
    assert "raise rollout.collect_timeout_s, or lower" not in str(caught.value)


def test_the_producers_failure_reaches_the_taker() -> None:
    async def scenario() -> None:
        buffer = RolloutBuffer(Lookahead(prompts_per_step=1))
        taking = asyncio.create_task(buffer.take(1, timeout_s=5, max_rejected=99))
        await asyncio.sleep(0)
        await buffer.fail(ValueError("the environment does not exist"))
        await taking

    with pytest.raises(ValueError, match="does not exist"):
        run(scenario())


class Play:
    """A run without a model: groups take any time, some fail, and the trainer takes steps."""

    def __init__(self, rules: Lookahead, *, seed: int, rejected: set[int], start: int = 0) -> None:
        self.rules = rules
        self.rng = random.Random(seed)
        self.rejected = rejected
        self.version = start
        self.buffer = RolloutBuffer(rules, version=start)
        self.next_index = 0
        self.trained: list[int] = []
        self.cut: list[int] = []
        self.overtakings = 0

    async def deliver(self, slot: Slot, number: int, dispatched_at: int) -> None:
        slow = 60 if self.rng.random() < 0.2 else 5
        for _ in range(self.rng.randrange(slow)):
            await asyncio.sleep(0)
        verdict = Verdict.FAILED if number in self.rejected else Verdict.TRAINABLE
        await self.buffer.fill(slot, group(number, dispatched_at), verdict=verdict)

    async def produce(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                slot = await self.buffer.reserve()
                tasks.create_task(self.deliver(slot, self.next_index, self.version))
                self.next_index += 1

    async def until(self, step: int) -> None:
        producer = asyncio.create_task(self.produce())
        while self.version < step:
            size = self.rules.prompts_per_step
            groups = await self.buffer.take(size, timeout_s=10, max_rejected=99)
            for taken in groups:
                late = self.version - taken.policy_version > self.rules.max_staleness
                assert taken.cut or not late, "older than the bound"
                if taken.cut:
                    self.cut.append(taken.index)
                elif taken.index not in self.rejected:
                    self.overtakings += bool(self.trained) and taken.index < max(self.trained)
                    self.trained.append(taken.index)
            counted = [taken for taken in groups if not taken.cut]
            assert sum(taken.index not in self.rejected for taken in counted) == size
            self.version += 1
            await self.buffer.advance(version=self.version)
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)


lookaheads = st.builds(
    lambda size, staleness, share, window, total: Lookahead(
        prompts_per_step=size,
        max_staleness=staleness,
        num_ahead=None if share is None else int(share * staleness * size),
        window=window,
        total_steps=total,
    ),
    size=st.integers(1, 5),
    staleness=st.integers(0, 3),
    share=st.none() | st.floats(0, 1),
    window=st.integers(0, 12),
    total=st.none() | st.integers(8, 12),
)
rejections = st.sets(st.integers(0, 30))


@settings(max_examples=60, deadline=None)
@given(
    rules=lookaheads,
    rejected=rejections,
    start=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_staleness_never_passes_its_bound_and_nothing_is_lost(
    rules: Lookahead, rejected: set[int], start: int, seed: int
) -> None:
    async def scenario() -> None:
        play = Play(rules, seed=seed, rejected=rejected, start=start)
        await play.until(8)
        if not rules.window:
            assert play.trained == sorted(play.trained), "strictly in order of dispatch"
        waiting = {slot.group.index for slot in play.buffer.line if slot.group is not None}
        assert not waiting & set(play.trained)
        assert len(set(play.trained)) == len(play.trained), "a group was trained twice"
        gone = play.next_index - len(play.trained) - play.buffer.num_rejected
        assert gone == play.buffer.num_waiting, "a group is neither trained nor in line"

    run(scenario())


@settings(max_examples=40, deadline=None)
@given(rules=lookaheads, rejected=rejections, seed=st.integers(0, 1000))
def test_a_run_trains_its_first_prompts_whatever_overtakes_what(
    rules: Lookahead, rejected: set[int], seed: int
) -> None:
    ends = dataclasses.replace(rules, total_steps=6)

    async def scenario() -> None:
        play = Play(ends, seed=seed, rejected=rejected)
        await play.until(6)
        good = [index for index in range(play.next_index) if index not in rejected]
        assert sorted(play.trained) == good, "something was sampled and not trained"
        assert len(good) == 6 * ends.prompts_per_step
        assert not play.buffer.num_waiting

    run(scenario())


def test_a_finished_group_overtakes_as_far_as_the_window_and_the_bound_allow() -> None:
    async def taken_first(window: int, version: int) -> str | None:
        rules = Lookahead(prompts_per_step=1, max_staleness=1, window=window)
        buffer = RolloutBuffer(rules)
        slots = [await buffer.reserve() for _ in range(2)]
        if version == 1:
            await buffer.fill(slots[0], group(9), verdict=Verdict.TRAINABLE)
            await buffer.take(1, timeout_s=5, max_rejected=0)
            await buffer.advance(version=1)
            slots = [slots[1], await buffer.reserve()]
        await buffer.fill(slots[1], group(1), verdict=Verdict.TRAINABLE)
        if await never(buffer.take(1, timeout_s=5, max_rejected=0)):
            return None
        return slots[1].group.id if slots[1].group is not None else None

    assert run(taken_first(window=0, version=0)) is None
    assert run(taken_first(window=1, version=0)) == "1"
    assert run(taken_first(window=1, version=1)) is None, "the head is due in this very step"


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 5),
    staleness=st.integers(0, 2),
    ahead=st.integers(1, 6),
    rejected=rejections,
    seed=st.integers(0, 1000),
)
def test_stragglers_are_cut_at_the_bound_and_at_most_as_many_as_were_sampled_ahead(
    size: int, staleness: int, ahead: int, rejected: set[int], seed: int
) -> None:
    rules = Lookahead(
        prompts_per_step=size, max_staleness=staleness, num_ahead=ahead, cuts=True, total_steps=8
    )

    async def scenario() -> None:
        play = Play(rules, seed=seed, rejected=rejected)
        cutting = asyncio.create_task(count_cuts(play.buffer))
        await play.until(8)
        for _ in range(100):  # what is left of the last cuts comes in
            await asyncio.sleep(0)
        cutting.cancel()
        assert not set(play.cut) & set(play.trained)
        assert len(play.trained) == 8 * size
        given_up = play.next_index - 8 * size
        assert given_up <= 8 * ahead + len(rejected) + ahead

    async def count_cuts(buffer: RolloutBuffer) -> None:
        while True:
            slot = await buffer.next_cut()
            assert slot.group is None and slot.cut

    run(scenario())


def test_what_is_cut_comes_along_with_the_next_step_as_data() -> None:
    async def scenario() -> None:
        rules = Lookahead(prompts_per_step=1, num_ahead=1, cuts=True)
        buffer = RolloutBuffer(rules)
        slow, quick = [await buffer.reserve() for _ in range(2)]
        assert await never(buffer.reserve())
        await buffer.fill(quick, group(1), verdict=Verdict.TRAINABLE)
        assert [g.index for g in await buffer.take(1, timeout_s=5, max_rejected=0)] == [1]
        assert await never(buffer.next_cut()), "its time has not passed before the next version"
        await buffer.advance(version=1)
        assert await buffer.next_cut() is slow
        await buffer.fill(slow, group(0), verdict=Verdict.FAILED)
        other = await buffer.reserve()
        await buffer.fill(other, group(2, 1), verdict=Verdict.TRAINABLE)
        taken = await buffer.take(1, timeout_s=5, max_rejected=0)
        assert [(g.index, g.cut, g.gave_up) for g in taken] == [(0, True, True), (2, False, False)]

    run(scenario())


def test_a_line_that_is_resumed_goes_on_in_its_order_and_counts_in_the_budget() -> None:
    async def scenario() -> None:
        line = [Slot(1), Slot(1), Slot(2)]
        line[1].group, line[1].verdict = group(5, 1), Verdict.TRAINABLE
        buffer = RolloutBuffer(Lookahead(prompts_per_step=2, max_staleness=1), version=2, line=line)
        last = await buffer.reserve()
        assert await never(buffer.reserve()), "four groups fill the budget of version 2"
        assert await never(buffer.take(1, timeout_s=5, max_rejected=0))
        await buffer.fill(line[0], group(4, 2), verdict=Verdict.TRAINABLE)
        taken = await buffer.take(2, timeout_s=5, max_rejected=0)
        assert [item.index for item in taken] == [4, 5]
        assert buffer.line == [line[2], last]

    run(scenario())


def test_what_would_have_been_cut_is_cut_in_a_line_that_is_resumed() -> None:
    """A checkpoint is written before the new version cuts what has come too late for it."""

    async def scenario() -> None:
        rules = Lookahead(prompts_per_step=1, num_ahead=2, cuts=True)
        slow, late = Slot(0), Slot(0)
        late.group, late.verdict = group(1), Verdict.TRAINABLE
        buffer = RolloutBuffer(rules, version=1, line=[slow, late])
        assert buffer.line == [] and slow.cut and late.cut
        quick = await buffer.reserve()
        await buffer.fill(quick, group(2, 1), verdict=Verdict.TRAINABLE)
        taken = await buffer.take(1, timeout_s=5, max_rejected=0)
        assert [(g.index, g.cut, g.gave_up) for g in taken] == [(1, True, True), (2, False, False)]

    run(scenario())


def test_a_step_in_which_nothing_can_be_trained_ends_with_the_cause() -> None:
    async def scenario() -> None:
        buffer = RolloutBuffer(Lookahead(prompts_per_step=1))

        async def produce() -> None:
            for index in range(100):
                await buffer.fill(await buffer.reserve(), group(index), verdict=Verdict.FAILED)

        producing = asyncio.create_task(produce())
        try:
            await buffer.take(1, timeout_s=5, max_rejected=3)
        finally:
            producing.cancel()

    with pytest.raises(TrainingError, match=r"4 groups in one step could not be trained"):
        run(scenario())


def test_groups_without_signal_are_replaced_until_the_refills_are_used_up_and_then_count() -> None:
    flat = {0, 2, 3, 4}

    async def scenario() -> tuple[list[list[str]], int]:
        buffer = RolloutBuffer(Lookahead(prompts_per_step=2))

        async def produce() -> None:
            for number in range(7):
                slot = await buffer.reserve()
                verdict = Verdict.NO_SIGNAL if number in flat else Verdict.TRAINABLE
                await buffer.fill(slot, group(number), verdict=verdict)

        producing = asyncio.create_task(produce())
        steps = []
        for step in range(2):
            taken = await buffer.take(2, timeout_s=5, max_rejected=0, max_refills=2)
            steps.append([item.id for item in taken])
            await buffer.advance(version=step + 1)
        await producing
        return steps, buffer.num_rejected

    steps, num_rejected = run(scenario())
    assert steps == [["0", "1", "2", "3"], ["4", "5", "6"]]  # 3 counts: both refills were used
    assert num_rejected == 3


def lines_of_a_take(num_waiting: int, *, window: int) -> int:
    """Count the lines of the buffer that taking one group costs with so many others in line."""

    async def scenario() -> int:
        cuts = not window
        rules = Lookahead(
            prompts_per_step=1, max_staleness=num_waiting, cuts=cuts, num_ahead=num_waiting,
            window=window,
        )  # fmt: skip
        buffer = RolloutBuffer(rules)
        slots = [await buffer.reserve() for _ in range(num_waiting + 1)]
        at = window or num_waiting
        await buffer.fill(slots[at], group(at), verdict=Verdict.TRAINABLE)
        with count_lines(of="rollout/buffer.py") as lines:
            (taken,) = await buffer.take(1, timeout_s=5, max_rejected=0)
        assert taken.id == str(at)
        return lines.number

    return run(scenario())


@pytest.mark.parametrize("window", [0, 4])
def test_taking_a_group_costs_the_same_however_many_are_in_line(window: int) -> None:
    assert lines_of_a_take(2000, window=window) == lines_of_a_take(20, window=window)
