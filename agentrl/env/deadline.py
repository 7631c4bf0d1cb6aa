"""Synchronous calls into an environment, outside of an episode, that may never return."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

from agentrl.errors import EnvError, EnvTimeout

T = TypeVar("T")


def call_within(function: Callable[[], T], timeout_s: float, *, what: str, fix: str) -> T:
    """Call ``function`` on a thread and wait for it.

    A call that does not return keeps its thread, which does not keep the process from ending.

    Args:
        what: is called, for the message.
        fix: what to do about a call that is late.

    Raises:
        EnvTimeout: no answer within ``timeout_s`` seconds.
        BaseException: whatever the function raises, ``SystemExit`` too.
    """
    future = _start(function)
    try:
        return future.result(timeout_s)
    except concurrent.futures.TimeoutError:
        if future.done():  # one of its own
            raise
        raise EnvTimeout(f"{what} did not return within {timeout_s:g} s; {fix}") from None


async def answer_within(function: Callable[[], T], timeout_s: float) -> T:
    """Call ``function`` on a thread, off the event loop.

    Raises:
        TimeoutError: no answer within ``timeout_s`` seconds; its thread is left behind.
        EnvError: it called ``sys.exit``.
        Exception: whatever the function raises.
    """

    def guarded() -> T:
        try:
            return function()
        except SystemExit as ending:  # it would end the event loop
            raise EnvError(f"sys.exit({ending.code!r}) was called") from ending

    return await asyncio.wait_for(asyncio.wrap_future(_start(guarded)), timeout_s)


def _start(function: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run ``function`` on a daemon thread: those of a pool are joined when the process ends."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # handed to whoever waits
            future.set_exception(error)

    threading.Thread(target=work, name="agentrl-env-call", daemon=True).start()
    return future
