"""One event loop on a thread of its own, for what must live longer than a caller's event loop.

Servers that tools talk to are started before any event loop runs, and some are kept from one to the
next. Also used to ask them from code that is not asynchronous.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""By process: a thread does not survive a fork."""


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process; it runs until the process ends."""
    with _lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            _loops.clear()
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="agentrl-tools", daemon=True).start()
        return loop


async def in_background(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the background loop; cancelling the caller cancels it."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, background_loop()))


def wait_in_background(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run ``work`` on the background loop and block until it is done.

    Raises:
        TimeoutError: it was not done in time, and is cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(work, background_loop())
    try:
        return future.result(timeout_s)
    except TimeoutError:
        future.cancel()
        raise
