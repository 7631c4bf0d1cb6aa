"""An event loop whose clock jumps: hours of waiting take no time, and come out the same each time.

::

    elapsed_s = run_virtual(main())  # asyncio.sleep(3600) inside returns at once

When nothing is ready the clock moves to the next timer. There is no I/O: a socket or a pipe is
refused, as is a foreign thread that talks to the loop, since neither could say when it happens.
Work given to the loop's executor (``asyncio.to_thread``) runs in a thread of its own, one at a time
and in turn with the loop, and takes no virtual time but what it sleeps with :func:`sleep`.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from agentrl.errors import AgentRLError

T = TypeVar("T")
MAX_VIRTUAL_S = 1e7
"""Where the clock ends: floats tell no microseconds apart much later."""
THREAD_DEADLINE_S = 120.0
"""Real seconds that work in a thread may hold the loop up."""
_jobs = threading.local()


class VirtualTimeError(AgentRLError):
    """Something that virtual time cannot serve."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop with a clock of its own, which starts at 0.

    Attributes:
        num_turns: times the loop went round, as a measure of what it had to do.
    """

    def __init__(self, *, limit_s: float = MAX_VIRTUAL_S) -> None:
        self._now_s = 0.0
        self._limit_s = limit_s
        self._asleep: set[_Job] = set()
        self._home_thread = threading.get_ident()
        self.num_turns = 0
        super().__init__(_NoIO(self._nothing_ready))
        # Above the rounding of float64 at the limit: else a timer could stay just ahead for ever.
        self._clock_resolution = 1e-8

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._now_s

    def block(self, seconds: float) -> None:
        """Let time pass while the loop does nothing else, as code does that holds it up."""
        self._now_s += seconds

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
        """Refuse threads that the clock does not know.

        Raises:
            VirtualTimeError: called from one.
        """
        if threading.get_ident() != self._home_thread and getattr(_jobs, "current", None) is None:
            raise VirtualTimeError(
                f"thread {threading.current_thread().name!r} calls into a loop with virtual time, "
                "which cannot know when that happens; use an AsyncEnv, or asyncio.to_thread"
            )
        return super().call_soon_threadsafe(*args, **kwargs)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Run ``func`` in a thread, up to its end or its first :func:`sleep`, then go on.

        Raises:
            VirtualTimeError: it waits for something else than :func:`sleep` for too long.
        """
        future: asyncio.Future[Any] = self.create_future()
        _Job(self, partial(func, *args), future).go_on()
        return future

    def close(self) -> None:
        """End what sleeps in threads; see :meth:`asyncio.AbstractEventLoop.close`."""
        for job in list(self._asleep):
            job.stop()
        super().close()

    def _nothing_ready(self, timeout: float | None) -> None:
        """Count a turn; jump to the next timer where nothing is ready."""
        self.num_turns += 1
        if timeout is None:
            raise VirtualTimeError(
                f"after {self._now_s:g} virtual seconds nothing is left that could happen, and "
                f"these wait: {_waiting(self)}"
            )
        self._now_s += timeout
        if self._now_s > self._limit_s:
            raise VirtualTimeError(
                f"{self._limit_s:g} virtual seconds have passed, and these still wait: "
                f"{_waiting(self)}"
            )

    def _note(self, job: _Job, *, asleep: bool) -> None:
        (self._asleep.add if asleep else self._asleep.discard)(job)


class _NoIO(selectors.SelectSelector):
    """Never waits: hands the time that it should have waited to the clock."""

    def __init__(self, pass_time: Callable[[float | None], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if self.get_map():  # the loop's own pipe comes first
            raise VirtualTimeError(
                "a socket, pipe or process was opened on a loop with virtual time, which cannot "
                "know how long it takes; use a fake, such as FakeSandboxes"
            )
        return super().register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[Any]:
        self._pass_time(timeout)
        return []


class _Job:
    """A function in a thread that runs only while the loop waits for it, and the other way round.

    So there is one order of everything, whatever the operating system does.
    """

    def __init__(
        self, loop: VirtualTimeLoop, func: Callable[[], Any], future: asyncio.Future[Any]
    ) -> None:
        self._loop = loop
        self._func = func
        self._future = future
        self._may_run = threading.Event()
        self._has_paused = threading.Event()
        self._stopped = False
        self._outcome: tuple[Any, BaseException | None] | None = None
        threading.Thread(target=self._run, name="virtual-time", daemon=True).start()

    def go_on(self) -> None:
        """Let the thread run until it sleeps or ends. Called on the loop."""
        self._loop._note(self, asleep=False)
        self._has_paused.clear()
        self._may_run.set()
        if not self._has_paused.wait(THREAD_DEADLINE_S):
            raise VirtualTimeError(
                f"work in a thread held virtual time up for {THREAD_DEADLINE_S:g} s; it may wait "
                "for nothing but agentrl.testing.virtual_time.sleep"
            )
        if self._outcome is not None and not self._future.done():
            result, error = self._outcome
            if error is None:
                self._future.set_result(result)
            else:
                self._future.set_exception(error)

    def sleep(self, seconds: float) -> None:
        """Give way to the loop for a while. Called in the thread, while the loop waits."""
        self._loop.call_later(seconds, self.go_on)
        self._loop._note(self, asleep=True)
        self._may_run.clear()
        self._has_paused.set()
        self._may_run.wait()
        if self._stopped:
            raise VirtualTimeError("the loop was closed while a thread slept")

    def stop(self) -> None:
        """End the thread: its sleep raises."""
        self._stopped = True
        with contextlib.suppress(VirtualTimeError):
            self.go_on()

    def _run(self) -> None:
        self._may_run.wait()
        _jobs.current = self
        try:
            self._outcome = (self._func(), None)
        except BaseException as error:
            self._outcome = (None, error)
        self._has_paused.set()


def sleep(seconds: float) -> None:
    """Let virtual time pass in code that is not a coroutine.

    In a thread of ``asyncio.to_thread`` the loop goes on meanwhile; on the loop's own thread
    nothing does.

    Raises:
        VirtualTimeError: there is no virtual clock here.
    """
    job = getattr(_jobs, "current", None)
    if job is not None:
        job.sleep(seconds)
        return
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    if not isinstance(loop, VirtualTimeLoop):
        raise VirtualTimeError("no virtual clock runs here; start the program with run_virtual")
    loop.block(seconds)


def run_virtual(main: Coroutine[Any, Any, T], *, limit_s: float = MAX_VIRTUAL_S) -> T:
    """Run a coroutine as ``asyncio.run`` does, in virtual time.

    Args:
        limit_s: virtual seconds after which it is given up.

    Raises:
        VirtualTimeError: the limit passed, or it waits for what will never happen; says for what.
    """
    with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, limit_s=limit_s)) as runner:
        return runner.run(main)


def _waiting(loop: asyncio.AbstractEventLoop, most: int = 5) -> str:
    names = sorted(task.get_name() for task in asyncio.all_tasks(loop))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
