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
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            await self._buffer.fail(_ended(error, "the stream of prompts"))
        except SystemExit as error:
            await self._buffer.fail(_ended(error, "the stream of prompts"))
        except Exception as error:
            await self._buffer.fail(error)

    async def _deliver(self, dispatch: Dispatch, slot: Slot) -> None:
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
