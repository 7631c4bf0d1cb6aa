"""Names the tool that holds the event loop: every trajectory of the process waits for it.

A coroutine that does not await cannot be interrupted, so all there is to do is to say whose it is.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from weakref import WeakSet

logger = logging.getLogger(__name__)

TASK_PREFIX = "tool "
"""Names of tasks that run a tool begin so, and go on with its name."""
_MAX_LAG_S = 2.0
_EVERY_S = 1.0

_watched: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def watch_running_loop(*, max_lag_s: float = _MAX_LAG_S) -> None:
    """Warn, once a tool, where a tool holds the running event loop for longer than ``max_lag_s``.

    Idempotent; ends with the loop.
    """
    loop = asyncio.get_running_loop()
    if loop in _watched:
        return
    _watched.add(loop)
    threading.Thread(
        target=_watch,
        args=(loop, threading.get_ident(), max_lag_s),
        name="agentrl-loop-watchdog",
        daemon=True,
    ).start()


def _watch(loop: asyncio.AbstractEventLoop, thread_id: int, max_lag_s: float) -> None:
    told: set[str] = set()
    while True:
        beat = threading.Event()
        try:
            loop.call_soon_threadsafe(beat.set)
        except RuntimeError:  # closed
            return
        while not beat.wait(max_lag_s):
            if loop.is_closed():
                return
            _tell(loop, thread_id, max_lag_s, told)
        time.sleep(_EVERY_S)


def _tell(
    loop: asyncio.AbstractEventLoop, thread_id: int, max_lag_s: float, told: set[str]
) -> None:
    task = asyncio.current_task(loop)
    name = "" if task is None else task.get_name()
    if not name.startswith(TASK_PREFIX) or name in told:
        return
    told.add(name)
    frame = sys._current_frames().get(thread_id)
    stack = "" if frame is None else "".join(traceback.format_stack(frame, limit=4)[-3:])
    logger.warning(
        "%s has held the event loop for more than %g s: all trajectories wait, and its deadline "
        "cannot end it. Make its method a plain 'def', which runs in a thread, or await what takes "
        "long. It is at:\n%s",
        name,
        max_lag_s,
        stack,
    )
