"""Stacks of processes that hang, and which of them the others wait for.

A rank registers a signal handler of :mod:`faulthandler`, which writes the Python stacks of all
threads in C: also where the main thread sits in a collective or holds the interpreter lock for
good. It writes into anonymous memory, which a process on the same machine reads through ``/proc``:
nothing is left on disk, however the rank ends.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

_SIGNAL = signal.SIGUSR1
_POLL_S = 0.05
_MAX_BYTES = 20_000
"""Kept of one process's stacks: those of idle threads fill the rest."""
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_COLLECTIVE = "torch/distributed/"
"""Part of the path of every function that waits for other ranks."""


@dataclass(slots=True, frozen=True)
class StackSource:
    """A process whose stacks can be asked for, from its machine."""

    pid: int
    fd: int
    """Of the memory that it writes to."""


def offer_stacks() -> StackSource:
    """Let other processes ask for this one's stacks from now on. Called in the main thread."""
    fd = os.memfd_create("agentrl-stacks")
    faulthandler.register(_SIGNAL, file=fd, all_threads=True, chain=False)
    return StackSource(os.getpid(), fd)


def ask_stacks(source: StackSource, *, timeout_s: float = 3.0) -> str:
    """Return the stacks of all threads of a process on this machine, or why there are none.

    Args:
        source: what :func:`offer_stacks` returned there.
        timeout_s: within which it must have written them.
    """
    path = f"/proc/{source.pid}/fd/{source.fd}"
    try:
        before = os.stat(path).st_size
        os.kill(source.pid, _SIGNAL)
        deadline = time.monotonic() + timeout_s
        size, last = before, -1
        while size == before or size != last:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
            size, last = os.stat(path).st_size, size
        with open(path, "rb") as file:
            file.seek(before)
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"no stack: process {source.pid} cannot be asked ({error})"
    return text or f"no stack: process {source.pid} wrote none within {timeout_s:g} s (stopped?)"


def stack_of_call(stacks: str, entry: str) -> str:
    """Return the stack of the thread in which the function ``entry`` runs, else all of them.

    Args:
        stacks: of all threads of a process.
        entry: ``file.py`` and name, as in ``ray_group.py:invoke``.
    """
    file, _, function = entry.partition(":")
    for thread in stacks.strip().split("\n\n"):
        frames = [found for line in thread.splitlines() if (found := _FRAME.search(line))]
        if any(f["file"].endswith(file) and f["name"] == function for f in frames):
            return thread
    return stacks[:_MAX_BYTES]


def waits_for_others(stack: str) -> bool:
    """Whether the innermost frames of a thread are those of a collective."""
    frames = [found["file"] for line in stack.splitlines() if (found := _FRAME.search(line))]
    return any(_COLLECTIVE in file for file in frames[:3])


def late_ranks(stacks: Mapping[int, str]) -> list[int]:
    """Return the ranks that the others wait for.

    Args:
        stacks: rank -> stack of its call, of those that have not answered.

    Returns:
        Those that are not in a collective; where all are, all.
    """
    late = [rank for rank, stack in stacks.items() if not waits_for_others(stack)]
    return sorted(late or stacks)


def innermost_frame(stack: str) -> str:
    """Return where a thread stands, in few words: ``name (file.py:12)``."""
    found = _FRAME.search(stack)
    if found is None:
        return "unknown"
    return f"{found['name']} ({os.path.basename(found['file'])}:{found['line']})"
