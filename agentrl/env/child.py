"""The program of an environment's process; started by :mod:`agentrl.env.process`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import sys

from agentrl.env.frames import FrameReader, frame
from agentrl.env.table import EnvTable
from agentrl.errors import EnvError

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent_pid: int) -> None:
    """Answer calls from ``descriptor`` until it is closed."""
    die_with_parent(parent_pid)
    # What environments print must not mix with the progress display on the parent's stdout.
    os.dup2(2, 1)
    os.set_inheritable(descriptor, False)
    table = EnvTable()
    reader = FrameReader()
    # The parent may hang up in the middle of a call: there is no one left to tell.
    with (
        socket.socket(fileno=descriptor) as connection,
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
    ):
        while data := connection.recv(1 << 18):
            for payload in reader.feed(data):
                answer, failed = _answer(table, payload)
                connection.sendall(frame(answer))
                if failed:
                    gc.collect()  # an error holds its frames, and they all that was allocated
    table.close_all()


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent dies, however it dies.

    Without it only an idle child would notice, by the end of its stream; one that hangs would live
    on. Elsewhere than on Linux that is how it stays.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the request was in place
        os._exit(1)


def _answer(table: EnvTable, payload: bytes) -> tuple[bytes, bool]:
    """Return the answer, pickled, and whether it is an error."""
    label = "environment"
    try:
        method, key, args = pickle.loads(payload)
        label = f"environment, {method}"
        answer = (table.handle(method, key, args), None)
    except BaseException as error:
        answer = (None, error)
    try:
        return pickle.dumps(answer, pickle.HIGHEST_PROTOCOL), answer[1] is not None
    except Exception as error:
        what = "its error" if answer[1] is not None else "its answer"
        named = EnvError(
            f"{label}: {what} cannot be pickled, which an environment in a process of its own "
            f"needs: {type(error).__name__}: {error}"
        )
        return pickle.dumps((None, named), pickle.HIGHEST_PROTOCOL), True
