"""Keeps the buffer full: dispatches tasks in order, as far as the staleness budget allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from agentrl.errors import TrainingError
from agentrl.rollout.buffer import RolloutBuffer, Slot, Verdict
from agentrl.rollout.mix import PromptStream
from agentrl.rollout.tasks import Dispatch
from agentrl.types import TrajectoryGroup

RunGroup = Callable[[Dispatch], Awaitable[TrajectoryGroup]]
CutGroup = Callable[[Dispatch], Awaitable[None]]
Judge = Callable[[TrajectoryGroup], Verdict]


async def never_cut(dispatch: Dispatch) -> None:
    """Let a group that nobody waits for end by itself."""


class Producer:
    """Runs groups concurrently and delivers them to the buffer's slots.

    Args:
        run_group: samples one prompt's group; failures inside are data, an exception ends the run.
        judge: what a finished group is good for.
        cut: has the episodes of a group end now, with what they have.
    """

    def __init__(
        self,
        stream: PromptStream,
        buffer: RolloutBuffer,
        run_group: RunGroup,
        judge: Judge,
        cut: CutGroup = never_cut,
    ) -> None:
        self._stream = stream
        self._buffer = buffer
        self._run_group = run_group
        self._judge = judge
        self._cut = cut
        self.cursor = 0
        """Index in the stream of the prompt after the last one that was dispatched."""

    @asynccontextmanager
    async def running(self, *, start: int) -> AsyncIterator[None]:
        """Dispatch from the ``start``-th task on, until the block is left.

        What stands in line unfinished, in a resumed run, is played first. Leaving cancels the
        groups in flight and waits for them: agent loops close their environments and tools under
        deadlines of their own.
        """
        self.cursor = start
        dispatcher = asyncio.create_task(self._produce(start), name="producer")
        try:
            yield
        finally:
            dispatcher.cancel()
            await asyncio.gather(dispatcher, return_exceptions=True)

    async def _produce(self, start: int) -> None:
        try:
            async with asyncio.TaskGroup() as groups:
                for slot in self._buffer.line:
                    if slot.verdict is None:
                        groups.create_task(self._deliver(slot))
                groups.create_task(self._cut_stragglers())
                await self._dispatch(start, groups)
        except BaseExceptionGroup as error:
            await self._buffer.fail(_first(error))
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            await self._buffer.fail(_ended(error, "the stream of prompts"))
        except SystemExit as error:
            await self._buffer.fail(_ended(error, "the stream of prompts"))
        except Exception as error:
            await self._buffer.fail(error)

    async def _dispatch(self, start: int, groups: asyncio.TaskGroup) -> None:
        prompts = self._stream.starting_at(start)
        while True:
            slot = await self._buffer.reserve()
            # Not before there is room: what has been trained by then decides what comes.
            slot.dispatch = next(prompts)
            self.cursor = slot.dispatch.index + 1
            groups.create_task(self._deliver(slot))

    async def _cut_stragglers(self) -> None:
        while True:
            slot = await self._buffer.next_cut()
            assert slot.dispatch is not None
            await self._cut(slot.dispatch)

    async def _deliver(self, slot: Slot) -> None:
        dispatch = slot.dispatch
        assert dispatch is not None
        try:
            group = await self._run_group(dispatch)
            verdict = self._judge(group)
        except (asyncio.CancelledError, SystemExit) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            # A task group takes the first for a child that was not needed, and waits for ever.
            raise _ended(error, f"the group of task {dispatch.task.id!r}") from error
        group.gave_up = verdict is Verdict.FAILED
        await self._buffer.fill(slot, group, verdict=verdict)


def _is_cancelled() -> bool:
    """Tell whether this task was told to stop; else a cancellation is of a plug-in's making."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _ended(error: BaseException, what: str) -> TrainingError:
    made = TrainingError(
        f"{what} ended with {type(error).__name__}({error}), which nothing asked for: look for "
        "sys.exit or a cancellation in the environment, reward, estimator or curriculum"
    )
    made.__cause__ = error
    return made


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
