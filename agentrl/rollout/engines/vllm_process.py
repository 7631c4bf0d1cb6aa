"""The parent's end of vLLM's process: start it, talk to it, know that it is gone, leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import agentrl
from agentrl.errors import EngineError, EngineLost
from agentrl.rollout.engines.vllm_wire import (
    LENGTH,
    Answer,
    Call,
    Failed,
    Quit,
    Ready,
    Setup,
    frame,
)

_QUIT_S = 10.0
"""For the process to shut vLLM down before its group is killed."""
_LOG_TAIL_LINES = 30


class EngineProcess:
    """One process with vLLM in it, and its ranks, in a process group of their own.

    Args:
        on_message: gets what is no answer to a call, on the event loop.
        on_lost: gets the error once, when the process is gone without being told to quit.
        log_path: where its output goes.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[Any], None],
        on_lost: Callable[[EngineLost], None],
        log_path: Path,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._last_words = ""
        self._shared_files: Sequence[str] = ()
        self._serves = self._closing = self._killed = False
        self.lost: EngineLost | None = None
        """Why nothing can be sent any more."""

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    async def start(self, setup: Setup, *, env: Mapping[str, str], timeout_s: float) -> Ready:
        """Spawn the process and wait until it can serve.

        Raises:
            EngineError: it failed, ended, or took longer; with the end of its log.
        """
        ours, theirs = socket.socketpair()
        try:
            self._process = _spawn(theirs, env, self._log_path)
        except OSError as error:
            ours.close()
            raise EngineError(
                f"vLLM cannot be started with its log at {str(self._log_path)!r}: {error}; write "
                "rollout.engine.kwargs.log_path in a folder that exists, or leave it out"
            ) from error
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=1 << 26)
        self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._read(reader), name="vllm-messages")
        self._writer.write(frame(setup))
        try:
            async with asyncio.timeout(timeout_s):
                ready = await self._ready
                self._serves = True
                self._shared_files = ready.shared_files
                return ready
        except TimeoutError:
            await self.close()
            raise EngineError(
                f"vLLM did not start within {timeout_s} s (start_timeout_s); {self._log_tail()}"
            ) from None
        except EngineLost as error:
            await self.close()
            raise EngineError(f"vLLM did not start: {error}") from None
        except BaseException:
            await self.close()
            raise

    def send(self, message: Any) -> None:
        """Send a message without waiting.

        Raises:
            EngineLost: the process is gone.
        """
        if self.lost is not None:
            raise EngineLost(str(self.lost))
        assert self._writer is not None
        self._writer.write(frame(message))

    async def call(
        self, method: str, *args: Any, timeout_s: float | None, when_idle: bool = False
    ) -> Any:
        """Run a method of the engine loop and return what it returns.

        Raises:
            EngineError: it raised, or took longer than ``timeout_s``.
            EngineLost: the process is gone.
        """
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self.send(Call(number, method, args, when_idle))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise EngineError(
                f"vLLM did not answer to {method!r} within {timeout_s} s; {self._log_tail()}"
            ) from None
        finally:
            self._calls.pop(number, None)

    async def close(self) -> None:
        """Stop the process and everything it started. Idempotent."""
        self._closing = True
        process = self._process
        if process is None:
            return
        if self.lost is None and self._serves:
            with contextlib.suppress(EngineLost, OSError):
                self.send(Quit())
                await asyncio.to_thread(_wait, process, _QUIT_S)
        self._kill()
        await asyncio.to_thread(process.wait)
        self._process = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()

    def _kill(self) -> None:
        """End the whole group; it exists as long as any of its processes does."""
        if self._killed:  # and its number may be another's by now
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        for path in self._shared_files:
            Path(path).unlink(missing_ok=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._dispatch(pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            await self._gone()

    def _dispatch(self, message: Any) -> None:
        if isinstance(message, Answer):
            future = self._calls.get(message.number)
            if future is None or future.done():
                return
            if message.error is None:
                future.set_result(message.value)
            else:
                future.set_exception(EngineError(f"vLLM: {message.error}"))
        elif isinstance(message, Failed):
            self._last_words = message.message
        elif isinstance(message, Ready):
            assert self._ready is not None
            if not self._ready.done():
                self._ready.set_result(message)
        else:
            self._on_message(message)

    async def _gone(self) -> None:
        """Fail everything that waits; nothing of the group may outlive its leader."""
        if self._closing or self._process is None:
            return
        self._kill()
        status = await asyncio.to_thread(self._process.wait)
        said = f" after saying {self._last_words!r}" if self._last_words else ""
        text = f"the process of the vLLM engine is gone (status {status}){said}; {self._log_tail()}"
        self.lost = EngineLost(text)
        for future in [*self._calls.values(), *([self._ready] if self._ready else [])]:
            if not future.done():
                future.set_exception(EngineLost(text))
        self._on_lost(self.lost)

    def _log_tail(self) -> str:
        try:
            lines = self._log_path.read_text(errors="replace").splitlines()
        except OSError as error:
            return f"its log could not be read ({error})"
        tail = "\n".join(lines[-_LOG_TAIL_LINES:])
        return f"the end of its log, {self._log_path}:\n{tail}"


def _spawn(
    theirs: socket.socket, env: Mapping[str, str], log_path: Path
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter: nothing of this one is forked, CUDA least of all."""
    root = str(Path(agentrl.__file__).parent.parent)
    paths = [root, *filter(None, [env.get("PYTHONPATH")])]
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "agentrl.rollout.engines.vllm_core", str(theirs.fileno())],
            env={**env, "PYTHONPATH": os.pathsep.join(paths)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=timeout_s)
