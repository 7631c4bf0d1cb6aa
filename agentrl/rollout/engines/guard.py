"""Ends a program that was started here when this process is gone, whatever way it went."""

from __future__ import annotations

import contextlib
import subprocess
import sys

_PROGRAM = """
import os, signal, sys
sys.stdin.buffer.read()
try:
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
except ProcessLookupError:
    pass
"""
"""Standard input is a pipe whose other end only this process has: it is read to its end when that
is closed, or the process gone."""
_LEAVE_TIMEOUT_S = 10.0


class GroupGuard:
    """A process that outlives this one for as long as it takes to end a process group.

    Args:
        group: its number; the guard must be told of it before this process has let it go.
    """

    def __init__(self, group: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-E", "-S", "-c", _PROGRAM, str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends this process's group does not end it too
        )

    @property
    def pid(self) -> int:
        """Of the guard."""
        return self._process.pid

    def dismiss(self) -> None:
        """Leave the group alone: it has ended, and its number may come again. Idempotent."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LEAVE_TIMEOUT_S)
        if self._process.stdin is not None:
            self._process.stdin.close()
