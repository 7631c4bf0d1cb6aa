"""Keeps the buffer full: dispatches tasks in order, as far as the staleness budget allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from agentrl.rollout.buffer import RolloutBuffer, Slot, Verdict
from agentrl.rollout.mix import PromptStream
from agentrl.rollout.tasks import Dispatch
from agentrl.types import TrajectoryGroup

RunGroup = Callable[[Dispatch], Awaitable[TrajectoryGroup]]
Judge = Callable[[TrajectoryGroup], Verdict]


class Producer:
    """Runs groups concurrently and delivers them to the buffer's slots.

    Args:
        run_group: samples one prompt's group; failures inside are data, an exception ends the run.
        judge: what a finished group is good for.
    """

    def __init__(
        self,
        stream: PromptStream,
        buffer: RolloutBuffer,
        run_group: RunGroup,
        judge: Judge,
    ) -> None:
        self._stream = stream
        self._buffer = buffer
        self._run_group = run_group
        self._judge = judge

    @asynccontextmanager
    async def running(self, *, start: int) -> AsyncIterator[None]:
        """Dispatch from the ``start``-th task on, until the block is left.

        Leaving cancels the groups in flight and waits for them: agent loops close their
        environments and tools under deadlines of their own.
        """
        dispatcher = asyncio.create_task(self._dispatch(start), name="producer")
        try:
            yield
        finally:
            dispatcher.cancel()
            await asyncio.gather(dispatcher, return_exceptions=True)

    async def _dispatch(self, start: int) -> None:
        try:
            async with asyncio.TaskGroup() as groups:
                prompts = self._stream.starting_at(start)
                while True:
                    slot = await self._buffer.reserve()
                    # Not before there is room: what has been trained by then decides what comes.
                    groups.create_task(self._deliver(next(prompts), slot))
        except BaseExceptionGroup as error:
            await self._buffer.fail(_first(error))
        except Exception as error:
            await self._buffer.fail(error)

    async def _deliver(self, dispatch: Dispatch, slot: Slot) -> None:
        group = await self._run_group(dispatch)
        verdict = self._judge(group)
        group.gave_up = verdict is Verdict.FAILED
        await self._buffer.fill(slot, group, verdict=verdict)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
