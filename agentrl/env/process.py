"""Environments in a child process: what survives a hang that holds the interpreter lock.

The child is a fresh interpreter (:mod:`agentrl.env.child`) that serves many environments, one call
after the other. Calls and answers are pickle frames over a socket pair: an environment is code that
the user chose to run, so its answers are trusted as much as the code is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from agentrl.env.base import Episode
from agentrl.env.frames import FrameReader, frame
from agentrl.env.lane import Call, Lane
from agentrl.errors import EnvError
from agentrl.sandbox.base import Sandbox, SandboxLimits

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from agentrl.env.child import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_RECEIVE_BYTES = 1 << 18
_REAP_TIMEOUT_S = 2.0


class ProcessWorker:
    """Runs the calls of a lane in a child process, killed with its process group at a deadline.

    Args:
        owner: whose process it is, for messages.
    """

    def __init__(self, lane: Lane, *, owner: str = "the environment's") -> None:
        self._lane = lane
        self._owner = owner
        self._socket, child_socket = socket.socketpair()
        with contextlib.ExitStack() as opened:
            opened.enter_context(self._socket)  # closed where no process starts
            opened.enter_context(child_socket)
            self._process = subprocess.Popen(
                [
                    sys.executable, "-c", _BOOT,
                    json.dumps(sys.path), str(child_socket.fileno()), str(os.getpid()),
                ],
                pass_fds=(child_socket.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            opened.pop_all()
        child_socket.close()
        self._socket.setblocking(False)
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._closed = False
        lane.loop.add_reader(self._socket, self._readable)

    @property
    def pid(self) -> int:
        """Process id of the child, which leads its process group."""
        return self._process.pid

    def send(self, call: Call) -> None:
        """See :meth:`agentrl.env.lane.LaneWorker.send`."""
        args = tuple(
            dataclasses.replace(arg, sandboxes=NoSandboxes()) if isinstance(arg, Episode) else arg
            for arg in call.args
        )
        try:
            payload = pickle.dumps((call.method, call.key, args), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise EnvError(
                f"{call.label}: the arguments of {call.method} cannot be sent to {self._owner} "
                f"process: {type(error).__name__}: {error}"
            ) from error
        self._unsent += frame(payload)
        self._writable()

    def abandon(self) -> None:
        """Kill the child and its process group."""
        self._disconnect()
        self._kill()

    def close(self) -> None:
        """Hang up: the child closes its environments and ends."""
        self._disconnect()

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait for the child to end; kill it after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        self._kill()

    # ------------------------------------------------------------- event-loop callbacks

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._ended()
            return
        for payload in self._reader.feed(data):
            value, error = _unpickled(payload, self._owner)
            self._lane.finished(value, error)

    def _writable(self) -> None:
        if self._closed:
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            self._lane.loop.add_writer(self._socket, self._writable)
            return
        except OSError:  # the child is gone; the reader sees the end of the stream
            self._unsent.clear()
        self._lane.loop.remove_writer(self._socket)

    def _ended(self) -> None:
        self._disconnect()
        try:  # the stream closes a moment before the process is gone
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = None
        self._kill()
        self._lane.lost(f"{self._owner} process ended ({_reason(code)})")

    def _disconnect(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._lane.loop.is_closed():
                self._lane.loop.remove_reader(self._socket)
                self._lane.loop.remove_writer(self._socket)
            self._socket.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group may be empty
            os.killpg(self._process.pid, signal.SIGKILL)
        # Bounded: a process stuck in the kernel is reaped by init later.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_REAP_TIMEOUT_S)


class NoSandboxes:
    """Stands in for the sandboxes of an episode where a rubric runs in another process."""

    async def acquire(self, limits: SandboxLimits | None = None) -> Sandbox:
        """Refuse.

        Raises:
            EnvError: always.
        """
        raise EnvError(
            "a rubric that uses sandboxes must be asynchronous (`async def score`): then it runs "
            "in the main process, where the sandboxes are"
        )


def _unpickled(payload: bytes, owner: str) -> tuple[Any, BaseException | None]:
    try:
        return pickle.loads(payload)
    except Exception as error:
        return None, EnvError(
            f"the answer of {owner} process cannot be read: {type(error).__name__}: {error}"
        )


def _reason(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
