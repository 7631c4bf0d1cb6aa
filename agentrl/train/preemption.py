"""SIGTERM: a machine that is taken away gives a run some seconds to save and end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from agentrl.errors import EXIT_PREEMPTED


@contextmanager
def stop_on_sigterm(
    request_stop: Callable[[str], None], *, grace_s: float, how_to_go_on: str
) -> Iterator[None]:
    """While the block runs, let the first SIGTERM ask for an orderly end.

    A process that has not ended ``grace_s`` later is ended with ``EXIT_PREEMPTED``, wherever it
    stands: checkpoints are complete or absent. A second SIGTERM ends it at once, as without this.
    Outside of the main thread, which alone gets signals, nothing is done.

    Args:
        request_stop: called on the running event loop, with what asked for it.
        how_to_go_on: said where the time was too short.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    timer = threading.Timer(grace_s, _end, [grace_s, how_to_go_on])
    timer.daemon = True

    # Not by the loop's own handler: while an update computes the loop does not turn, and the time
    # that is left runs from the signal on.
    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        timer.start()
        loop.call_soon_threadsafe(request_stop, "SIGTERM")

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:  # the timer goes on: closing what is open belongs to the end
        signal.signal(signal.SIGTERM, before)


def _end(grace_s: float, how_to_go_on: str) -> None:
    text = f"Preempted: stopped by SIGTERM, but not ended within trainer.grace_s={grace_s:g}"
    sys.stderr.write(f"{text}; {how_to_go_on}\n")
    sys.stderr.flush()
    os._exit(EXIT_PREEMPTED)
