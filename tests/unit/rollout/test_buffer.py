from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import TrainingError
from agentrl.rollout.buffer import RolloutBuffer, Slot, Verdict
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
        buffer = RolloutBuffer(prompts_per_step=3, max_staleness=0)
        slots = [await buffer.reserve() for _ in range(3)]
        for index in (2, 0, 1):
            await buffer.fill(slots[index], group(index), verdict=Verdict.TRAINABLE)
        return [taken.id for taken in await buffer.take(3, timeout_s=5, max_rejected=99)]

    assert run(scenario()) == ["0", "1", "2"]


def test_synchronous_budget_is_one_step_until_the_next_version() -> None:
    async def scenario() -> None:
        buffer = RolloutBuffer(prompts_per_step=2, max_staleness=0)
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
        buffer = RolloutBuffer(prompts_per_step=1, max_staleness=0)
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
        buffer = RolloutBuffer(prompts_per_step=1, max_staleness=0)
        taking = asyncio.create_task(buffer.take(1, timeout_s=5, max_rejected=99))
        await asyncio.sleep(0)
        slot = await buffer.reserve()
        await buffer.fill(slot, group(0), verdict=Verdict.TRAINABLE)
        assert len(await taking) == 1

    run(scenario())


def test_a_late_step_says_what_was_missing_and_how_to_fix_it() -> None:
    async def scenario() -> None:
        buffer = RolloutBuffer(prompts_per_step=2, max_staleness=0)
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
        buffer = RolloutBuffer(prompts_per_step=2, max_staleness=0)

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
        buffer = RolloutBuffer(prompts_per_step=1, max_staleness=0)
        taking = asyncio.create_task(buffer.take(1, timeout_s=5, max_rejected=99))
        await asyncio.sleep(0)
        await buffer.fail(ValueError("the environment does not exist"))
        await taking

    with pytest.raises(ValueError, match="does not exist"):
        run(scenario())


@settings(max_examples=40, deadline=None)
@given(
    prompts_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    rejected=st.sets(st.integers(0, 30)),
    start=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_staleness_never_passes_its_bound(
    prompts_per_step: int, max_staleness: int, rejected: set[int], start: int, seed: int
) -> None:
    async def scenario() -> None:
        import random

        rng = random.Random(seed)
        buffer = RolloutBuffer(
            prompts_per_step=prompts_per_step, max_staleness=max_staleness, version=start
        )
        version = start
        index = 0

        async def deliver(slot: Slot, number: int, dispatched_at: int) -> None:
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)
            verdict = Verdict.FAILED if number in rejected else Verdict.TRAINABLE
            await buffer.fill(slot, group(number, dispatched_at), verdict=verdict)

        async def produce() -> None:
            nonlocal index
            async with asyncio.TaskGroup() as tasks:
                while True:
                    slot = await buffer.reserve()
                    tasks.create_task(deliver(slot, index, version))
                    index += 1

        producer = asyncio.create_task(produce())
        seen: list[int] = []
        for _ in range(6):
            groups = await buffer.take(prompts_per_step, timeout_s=10, max_rejected=99)
            seen += [int(taken.id) for taken in groups]
            assert all(version - taken.policy_version <= max_staleness for taken in groups)
            version += 1
            await buffer.advance(version=version)
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)
        assert seen == list(range(len(seen))), "every dispatch is taken once, in order"

    run(scenario())


def test_a_step_in_which_nothing_can_be_trained_ends_with_the_cause() -> None:
    async def scenario() -> None:
        buffer = RolloutBuffer(prompts_per_step=1, max_staleness=0)

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
        buffer = RolloutBuffer(prompts_per_step=2, max_staleness=0)

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
