"""Calls into code that is not ours, with a deadline that holds whatever that code does.

A coroutine that ignores cancellation is left behind; a function that never returns keeps its
thread, which is replaced. Both are counted, since either may hold memory or a lock for good.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_GRACE_S = 0.5
"""Seconds a cancelled coroutine gets for its cleaning up."""


class DeadlinePassed(TimeoutError):
    """The deadline of a call passed (and not one that the called code has of its own)."""

    note = ""
    """What the model is told beside that, where a tool server says so."""


class Abandoned:
    """How much was left behind in this process."""

    num_tasks = 0
    num_threads = 0


async def contained(work: Awaitable[T]) -> T:
    """Await code that is not ours, on a task of its own: it can end nothing beyond that.

    Raises:
        RuntimeError: it raised ``SystemExit``, which would end the event loop, or a
            ``CancelledError`` that nobody asked for, which would pass for the end of its caller.
    """
    try:
        return await work
    except SystemExit as ending:
        raise RuntimeError(f"raised {ending!r}") from ending
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("raised CancelledError, though nothing cancelled it") from error


def contained_call(function: Callable[[], T]) -> T:
    """As :func:`contained`, for a plain function."""
    try:
        return function()
    except Exception:  # an ordinary failure, which the caller tells as such
        raise
    except BaseException as error:
        raise RuntimeError(f"raised {error!r}") from error


async def within(
    coroutine: Coroutine[Any, Any, T], timeout_s: float, *, name: str | None = None
) -> T:
    """Await ``coroutine`` for at most ``timeout_s`` seconds.

    Unlike ``asyncio.wait_for`` it returns in time even where cancelling has no effect.

    Args:
        name: of the task that runs it.

    Raises:
        DeadlinePassed: no answer in time.
    """
    task = asyncio.create_task(coroutine, name=name)
    try:
        done, _ = await asyncio.wait((task,), timeout=timeout_s)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if done:
        return task.result()
    await _cancel(task)
    raise DeadlinePassed(f"no answer within {timeout_s:g} s")


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    done, _ = await asyncio.wait((task,), timeout=_GRACE_S)
    if not done:
        Abandoned.num_tasks += 1
        task.add_done_callback(_retrieve)
    elif not task.cancelled():
        task.exception()  # retrieved, so that nobody warns of it


def _retrieve(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()


class _Worker:
    """A daemon thread that runs one job at a time and goes back to the idle list."""

    _numbers = itertools.count()

    def __init__(self, idle: list[_Worker]) -> None:
        self._idle = idle
        self._jobs: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.abandoned = False
        name = f"agentrl-tool-{next(self._numbers)}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(
        self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], job: Callable[[], Any]
    ) -> None:
        self._jobs.put((loop, future, job))

    def _work(self) -> None:
        while True:
            loop, future, job = self._jobs.get()
            try:
                outcome = (job(), None)
            except BaseException as error:  # handed to whoever waits
                outcome = (None, error)
            if self.abandoned:
                return
            try:
                loop.call_soon_threadsafe(self._deliver, future, *outcome)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

    def _deliver(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None
    ) -> None:
        if self.abandoned:
            return
        self._idle.append(self)
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):  # a future refuses to carry one
            future.set_exception(RuntimeError(f"raised StopIteration({error})"))
        else:
            future.set_exception(error)


class OffLoop:
    """Runs synchronous functions on daemon threads, as many as are needed at a time.

    Used from one event loop. Daemon threads, since a pool's would be joined at exit and a hung
    call would then hold the process for ever.
    """

    def __init__(self) -> None:
        self._idle: list[_Worker] = []

    async def run(self, job: Callable[[], T], timeout_s: float) -> T:
        """Run ``job`` off the event loop.

        Raises:
            DeadlinePassed: it did not return in time; its thread is abandoned.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        worker = self._idle.pop() if self._idle else _Worker(self._idle)
        worker.submit(loop, future, job)
        try:
            done, _ = await asyncio.wait((future,), timeout=timeout_s)
        except asyncio.CancelledError:
            if future.done():  # just now: the thread waits for its next job
                _retrieve(future)
            else:
                self._abandon(worker)
            raise
        if done:
            return future.result()
        self._abandon(worker)
        raise DeadlinePassed(f"no answer within {timeout_s:g} s")

    @staticmethod
    def _abandon(worker: _Worker) -> None:
        worker.abandoned = True
        Abandoned.num_threads += 1
