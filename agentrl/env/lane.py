"""Lanes: where calls on environments run one after the other, each with a deadline.

A lane belongs to one event loop and one worker (a thread or a child process). Environments are
pinned to a lane. The clock of a call starts when the call before it has ended, so that waiting in
line is never held against an environment.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.env.table import EnvTable
from agentrl.errors import (
    AgentRLError,
    EnvError,
    EnvTimeout,
    InfrastructureError,
    RewardError,
    RewardTimeout,
)


@dataclass(slots=True, eq=False)
class Call:
    """One call in a lane."""

    method: str
    key: int
    args: tuple[Any, ...]
    timeout_s: float
    label: str
    future: asyncio.Future[Any]


class LaneWorker(Protocol):
    """What executes the calls of a lane, in order.

    It answers each call with ``lane.finished``, or once with ``lane.lost``, on the event loop.
    """

    def send(self, call: Call) -> None:
        """Queue a call.

        Raises:
            EnvError: the arguments cannot be sent to where the environment is.
        """
        ...

    def abandon(self) -> None:
        """Give up on the call that runs now; nothing more is answered."""
        ...

    def close(self) -> None:
        """End after the calls already queued. Idempotent."""
        ...


class Lane:
    """A queue of calls in front of one worker.

    Args:
        start_worker: given the lane, starts what executes its calls.
        on_dead: told once when the worker is gone; an error that it returns is raised in place of
            the time-out that caused it.
    """

    def __init__(
        self,
        start_worker: Callable[[Lane], LaneWorker],
        on_dead: Callable[[Lane], AgentRLError | None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.num_envs = 0
        self.dead: str | None = None
        """Why nothing can be called any more."""
        self.timed_out = False
        self._pending: deque[Call] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._on_dead = on_dead
        self.worker = start_worker(self)

    def call(
        self, method: str, key: int, args: tuple[Any, ...], *, timeout_s: float, label: str
    ) -> asyncio.Future[Any]:
        """Queue a call. The future raises what the environment raised, or:

        * ``EnvTimeout`` (``RewardTimeout`` for ``score``): it did not answer in time;
        * ``InfrastructureError``: another environment took the worker down.
        """
        future: asyncio.Future[Any] = self.loop.create_future()
        if self.dead is not None:
            future.set_exception(InfrastructureError(f"{label}: {self.dead}"))
            return future
        call = Call(method, key, args, timeout_s, label, future)
        try:
            self.worker.send(call)
        except AgentRLError as error:  # never left this process: nothing is pending
            future.set_exception(error)
            return future
        self._pending.append(call)
        if len(self._pending) == 1:
            self._start_clock()
        return future

    def close(self) -> None:
        """Stop the worker; calls still pending fail as infrastructure."""
        if self.dead is None:
            self.dead = "the environments of this run are closed"
            self._fail_pending(None)
            self.worker.close()

    # ------------------------------------------------------------- called by the worker

    def finished(self, value: Any, error: BaseException | None) -> None:
        """Take the answer to the oldest pending call."""
        if self.dead is not None or not self._pending:
            return
        call = self._pending.popleft()
        self._start_clock()
        if call.future.done():  # the caller was cancelled meanwhile
            return
        if error is None:
            call.future.set_result(value)
        elif isinstance(error, Exception):
            call.future.set_exception(error)
        else:  # a CancelledError would pass for the end of the caller
            kind = RewardError if call.method == "score" else EnvError
            call.future.set_exception(kind(f"{call.label}: {call.method} raised {error!r}"))

    def lost(self, reason: str) -> None:
        """Take note that the worker is gone: the call it was running is to blame."""
        if self.dead is not None:
            return
        head = self._pending[0] if self._pending else None
        error: AgentRLError | None = None
        if head is not None:
            kind = RewardError if head.method == "score" else EnvError
            error = kind(f"{head.label}: {reason} during {head.method}")
        self._die(f"{reason} in a call of another environment", error)

    # ------------------------------------------------------------- deadlines

    def _start_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending:
            self._timer = self.loop.call_later(self._pending[0].timeout_s, self._expired)

    def _expired(self) -> None:
        head = self._pending[0]
        kind = RewardTimeout if head.method == "score" else EnvTimeout
        error = kind(
            f"{head.label}: {head.method} did not return within {head.timeout_s:g} s "
            f"({_SETTING.get(head.method, 'env.step_timeout_s')})"
        )
        self.timed_out = True
        self.worker.abandon()
        self._die(f"an environment on the same worker hung in {head.method}", error)

    def _die(self, reason: str, head_error: AgentRLError | None) -> None:
        self.dead = reason
        fatal = self._on_dead(self)
        self._fail_pending(fatal or head_error)

    def _fail_pending(self, head_error: AgentRLError | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._pending:
            call = self._pending.popleft()
            if not call.future.done():
                call.future.set_exception(
                    head_error or InfrastructureError(f"{call.label}: {self.dead}")
                )
            head_error = None


_SETTING = {
    "open": "env.reset_timeout_s",
    "reset": "env.reset_timeout_s",
    "score": "rollout.reward_timeout_s",
    "close": "env.close_timeout_s",
}


class ThreadWorker:
    """Runs the calls of a lane on a thread.

    A thread cannot be ended from outside: once abandoned it is left to itself, and closes its
    environments and ends if the call ever returns.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="agentrl-env", daemon=True)
        self._thread.start()

    def send(self, call: Call) -> None:
        """See :meth:`LaneWorker.send`."""
        self._calls.put(call)

    def abandon(self) -> None:
        """See :meth:`LaneWorker.abandon`."""
        self._abandoned = True
        self._calls.put(None)

    def close(self) -> None:
        """See :meth:`LaneWorker.close`."""
        self._calls.put(None)

    @property
    def is_alive(self) -> bool:
        """True until the thread has ended; an abandoned one may never."""
        return self._thread.is_alive()

    def _run(self) -> None:
        table = EnvTable()
        while not self._abandoned:
            call = self._calls.get()
            if call is None:
                break
            value, error = None, None
            try:
                value = table.handle(call.method, call.key, call.args)
            except BaseException as caught:  # handed to the caller, whatever it is
                error = caught
            if self._abandoned or not self._answer(value, error):
                break
            # The next get() may wait for long: keep nothing of this call alive.
            del call, value, error
        table.close_all()

    def _answer(self, value: Any, error: BaseException | None) -> bool:
        try:
            self._lane.loop.call_soon_threadsafe(self._lane.finished, value, error)
        except RuntimeError:  # the event loop is closed: nobody waits any more
            return False
        return True
