"""Synchronous graders off the event loop: a bounded number at once, a hung one left behind.

A thread cannot be ended from outside. One that passes its deadline is abandoned; too many that
never come back stop the run. What holds the interpreter lock while it hangs (a regular expression
that backtracks without end) holds up everything: such code belongs into a process
(:mod:`agentrl.reward.process`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

from agentrl.errors import ThreadLeakError
from agentrl.tool.deadline import DeadlinePassed, OffLoop

T = TypeVar("T")

MAX_THREADS = 16
"""Synchronous graders that run at once; the others wait, which is not held against them."""
MAX_LEAKED_THREADS = 8
"""Graders that hang for good before the run stops."""


class GraderThreads:
    """The threads of one event loop's graders."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MAX_THREADS)
        self._off_loop = OffLoop()
        self._leaked: set[object] = set()

    async def run(self, job: Callable[[], T], timeout_s: float) -> T:
        """Run ``job`` on a thread; its clock starts when a thread is free.

        Raises:
            DeadlinePassed: it did not return in time; its thread is abandoned.
            ThreadLeakError: more than :data:`MAX_LEAKED_THREADS` such threads have not ended.
        """
        ticket = object()

        def tracked() -> T:
            try:
                return job()
            finally:
                self._leaked.discard(ticket)
                finished.append(ticket)

        finished: list[object] = []
        async with self._slots:
            try:
                return await self._off_loop.run(tracked, timeout_s)
            except DeadlinePassed:
                self._leaked.add(ticket)
                if finished:  # it returned between the deadline and here
                    self._leaked.discard(ticket)
                if len(self._leaked) > MAX_LEAKED_THREADS:
                    raise ThreadLeakError(
                        f"{len(self._leaked)} threads hang in reward functions, more than "
                        f"{MAX_LEAKED_THREADS}; mend the function, or put it into a file "
                        "(reward.path=./file.py:function), which runs it in a process that can "
                        "be ended"
                    ) from None
                raise


_threads: WeakKeyDictionary[asyncio.AbstractEventLoop, GraderThreads] = WeakKeyDictionary()


def grader_threads() -> GraderThreads:
    """Return the threads of the running event loop, shared by all its rubrics."""
    return _threads.setdefault(asyncio.get_running_loop(), GraderThreads())
