"""Ctrl-C while a training lets no event loop turn.

The loop notes a first Ctrl-C as a cancellation of its main task, which finds out at its next
``await``: of a training that is one long call, when it has ended. So the training asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Ended(BaseException):
    """Work that was cancelled, on its way out."""


def end_if_cancelled() -> None:
    """End the work of :func:`interruptible` where its task was cancelled; to be called often."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop: Ctrl-C comes as KeyboardInterrupt
        return
    if task is not None and task.cancelling():
        raise _Ended


async def interruptible(work: Callable[[], T]) -> T:
    """Return what ``work`` returns, which runs in this thread and holds the event loop.

    Raises:
        CancelledError: the task was cancelled meanwhile, and the work has ended.
    """
    try:
        return work()
    except _Ended:
        await asyncio.sleep(0)  # the cancellation arrives here, so that clean-ups can await
        raise AssertionError("the cancellation did not arrive") from None
