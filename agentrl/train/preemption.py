"""SIGTERM: a machine that is taken away gives a run some seconds to save and end."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from agentrl.errors import EXIT_PREEMPTED
from agentrl.train.manifest import step_of


def going_on(run: Path, command: str) -> str:
    """Say what of a run that was stopped is saved, and that ``command`` goes on with it.

    Read from its folder: the last checkpoint may have been begun, and not be complete.
    """
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    steps = [step for step in map(step_of, names) if step]
    if not steps:
        return f"no checkpoint is saved yet, so it begins anew with {command}"
    return f"the checkpoint of step {max(steps)} is saved; go on with {command}"


def resume_command(run: Path) -> str:
    """Return what a shell takes to go on with a run of `agentrl train`."""
    return f"agentrl train --resume {shlex.quote(str(run))}"


@contextmanager
def stop_on_sigterm(
    request_stop: Callable[[str], None],
    *,
    grace_s: float,
    how_to_go_on: Callable[[], str],
    setting: str = "trainer.grace_s",
    at_once: bool = False,
) -> Iterator[None]:
    """While the block runs, let the first SIGTERM ask for an orderly end.

    A process that has not ended ``grace_s`` later is ended with ``EXIT_PREEMPTED``, wherever it
    stands: checkpoints are complete or absent. A second SIGTERM ends it at once, as without this.
    Outside of the main thread, which alone gets signals, nothing is done.

    Args:
        request_stop: called on the running event loop, with what asked for it.
        how_to_go_on: what to say where the time was too short; asked then, in another thread.
        setting: that ``grace_s`` comes from.
        at_once: call ``request_stop`` where the signal interrupts the main thread, for work that
            lets no event loop turn; it may only take a note.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ask = request_stop
    if not at_once:
        ask = partial(asyncio.get_running_loop().call_soon_threadsafe, request_stop)
    timer = threading.Timer(grace_s, _end, [f"{setting}={grace_s:g}", how_to_go_on])
    timer.daemon = True

    # Not by the loop's own handler: while an update computes the loop does not turn, and the time
    # that is left runs from the signal on.
    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        timer.start()
        ask("SIGTERM")

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:  # the timer goes on: closing what is open belongs to the end
        signal.signal(signal.SIGTERM, before)


def _end(setting: str, how_to_go_on: Callable[[], str]) -> None:
    try:
        text = f"Preempted: stopped by SIGTERM, but not ended within {setting}"
        sys.stderr.write(f"{text}; {how_to_go_on()}\n")
        sys.stderr.flush()
    finally:  # a disk or a terminal that is gone must not keep the process
        os._exit(EXIT_PREEMPTED)
