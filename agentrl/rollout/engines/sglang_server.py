"""The process of an SGLang server, and what it says of itself."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from agentrl.errors import EngineError, EngineLost
from agentrl.rollout.engines.guard import GroupGuard
from agentrl.rollout.engines.http import JsonClient, NoAnswer, Unreachable

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
_STOP_TIMEOUT_S = 20.0
_LOG_LINES = 20


class ServerProcess:
    """A server that was started here, which ends with this process at the latest.

    What it has started ends with it.

    Args:
        command: program and arguments.
        log_path: gets its output; None takes a temporary file.
    """

    def __init__(self, command: Sequence[str], log_path: str | None) -> None:
        self._command = list(command)
        self._keeps_log = log_path is not None
        self._log_path = None if log_path is None else Path(log_path)
        self._process: asyncio.subprocess.Process | None = None
        self._guard: GroupGuard | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it.

        Raises:
            EngineError: there is no such program, or no place for its log.
        """
        try:
            with self._open_log() as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # its group: the server starts processes of its own
                )
            self._guard = GroupGuard(self._process.pid)
        except OSError as error:
            if self._process is not None:  # nobody would end it
                os.killpg(self._process.pid, signal.SIGKILL)
            self._drop_log()
            raise EngineError(
                f"rollout.engine.kwargs.command: {self._command[0]!r} cannot be run with its log "
                f"at {str(self._log_path)!r}: {error}; mend the command, or kwargs.log_path"
            ) from error

    def _open_log(self) -> BinaryIO:
        if self._log_path is None:
            handle, path = tempfile.mkstemp(prefix="agentrl-sglang-", suffix=".log")
            os.close(handle)
            self._log_path = Path(path)
        return self._log_path.open("ab")

    def _drop_log(self) -> None:
        if self._log_path is not None and not self._keeps_log:
            self._log_path.unlink(missing_ok=True)

    def check(self) -> None:
        """Return while it runs.

        Raises:
            EngineLost: it has ended; the message has the end of its log.
        """
        code = None if self._process is None else self._process.returncode
        if code is not None:
            raise EngineLost(f"the SGLang server has ended with status {code}: {self.log_end}")

    async def stop(self) -> None:
        """End it and its children, and wait. Idempotent."""
        process = self._process
        if process is None:
            return
        ran = process.returncode is None
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                continue
        self._process = None
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
        if ran:  # of one that failed the log stays
            self._drop_log()

    @property
    def log_end(self) -> str:
        """Last lines of its log."""
        if self._log_path is None:
            return "no log"
        try:
            lines = self._log_path.read_text(errors="replace").splitlines()
        except OSError:
            return "no log"
        return "\n".join(lines[-_LOG_LINES:]) or "its log is empty"


async def wait_until_ready(
    client: JsonClient, process: ServerProcess | None, *, timeout_s: float
) -> dict[str, Any]:
    """Wait until a server answers, and return what it says of itself (``/server_info``).

    Raises:
        EngineLost: its process ended meanwhile.
        EngineError: it did not answer within ``timeout_s``, or lets nobody in.
    """
    failure, told = "nothing was asked", False
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                if process is not None:
                    process.check()
                try:
                    reply = await client.get("/server_info", timeout_s=timeout_s)
                    if reply.status == 200 and isinstance(reply.body, dict):
                        return reply.body
                    failure = f"{client.base_url}/server_info: {reply.text}"
                    if reply.status in (401, 403) or reply.leads_to:
                        raise EngineError(failure)  # nothing that waiting would change
                except (Unreachable, NoAnswer) as error:
                    failure = str(error)
                if process is None and not told:
                    told = True
                    logger.warning(
                        "waiting for the SGLang server at %s, which has to be started by hand "
                        "without rollout.engine.kwargs.command, for %g s at most: %s",
                        client.base_url,
                        timeout_s,
                        failure,
                    )
                await asyncio.sleep(_LOOK_EVERY_S)  # it has no way to tell when it is ready
    except TimeoutError:
        raise EngineError(
            f"the SGLang server at {client.base_url} is not ready after {timeout_s:g} s "
            f"({failure}); start it, or raise start_timeout_s"
        ) from None
