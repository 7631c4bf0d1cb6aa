"""Whatever ends a group or the stream of prompts reaches who waits for groups, at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest

from agentrl.errors import TrainingError
from agentrl.rollout.buffer import Lookahead, RolloutBuffer, Verdict
from agentrl.rollout.producer import Producer
from agentrl.rollout.tasks import Dispatch, TaskStream
from agentrl.types import Task, TrajectoryGroup

TASKS = [Task(id=f"t{index}", data={}) for index in range(4)]
ENDINGS = {"exit": lambda: sys.exit(0), "cancel": lambda: _raise(asyncio.CancelledError())}
DEADLINE_S = 20.0


def _raise(error: BaseException) -> None:
    raise error


class Stream(TaskStream):
    """Ends in its own way at the third prompt."""

    ending = "none"

    def starting_at(self, index: int) -> Iterator[Dispatch]:
        for dispatch in super().starting_at(index):
            if dispatch.index == 2 and self.ending in ENDINGS:
                ENDINGS[self.ending]()
            yield dispatch


def collect(stream: Stream, *, in_group: str = "none", in_judge: str = "none") -> None:
    async def play(dispatch: Dispatch) -> TrajectoryGroup:
        await asyncio.sleep(0)
        if in_group in ENDINGS:
            ENDINGS[in_group]()
        return TrajectoryGroup(
            id="g", task=dispatch.task, env_id="e", trajectories=[], policy_version=0
        )

    def judge(group: TrajectoryGroup) -> Verdict:
        if in_judge in ENDINGS:
            ENDINGS[in_judge]()
        return Verdict.TRAINABLE

    async def scenario() -> None:
        buffer = RolloutBuffer(Lookahead(prompts_per_step=4))
        async with (
            asyncio.timeout(DEADLINE_S),
            Producer(stream, buffer, play, judge).running(start=0),
        ):
            await buffer.take(4, timeout_s=2 * DEADLINE_S, max_rejected=0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("ending", "error"), [("exit", r"SystemExit\(0\)"), ("cancel", r"CancelledError\(\)")]
)
def test_an_ending_that_nobody_asked_for_fails_the_step_and_is_named(
    ending: str, error: str
) -> None:
    stream = Stream(TASKS, seed=0, source="t")
    with pytest.raises(TrainingError, match=f"the group of task 't.' ended with {error}"):
        collect(stream, in_group=ending)
    with pytest.raises(TrainingError, match=f"the group of task 't.' ended with {error}"):
        collect(stream, in_judge=ending)
    stream.ending = ending
    with pytest.raises(TrainingError, match=f"the stream of prompts ended with {error}"):
        collect(stream)


def test_leaving_the_block_ends_the_groups_in_flight_without_an_error() -> None:
    cancelled: list[int] = []

    async def play(dispatch: Dispatch) -> TrajectoryGroup:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(dispatch.index)
            raise
        raise AssertionError

    async def scenario() -> None:
        buffer = RolloutBuffer(Lookahead(prompts_per_step=3))
        producer = Producer(
            TaskStream(TASKS, seed=0, source="t"), buffer, play, lambda group: Verdict.TRAINABLE
        )
        async with asyncio.timeout(DEADLINE_S), producer.running(start=0):
            while buffer.num_waiting < 3:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert sorted(cancelled) == [0, 1, 2]
