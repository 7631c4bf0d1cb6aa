"""The parent of a sandbox server's workers: binds the socket, starts them, replaces the dead."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, SandboxError, SandboxUnavailable
from agentrl.sandbox.serving.listening import check_port
from agentrl.sandbox.serving.settings import ServingSettings

_START_S = 60.0
_STOP_S = 30.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0
_SOUND_AFTER_S = 60.0
_BACKLOG = 2048


def bind(host: str, port: int, uds: str | None, *, has_token: bool) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: it would be open to other machines without a token, or cannot be bound.
    """
    if uds is not None:
        return _bind_unix(uds)
    if not has_token and not _is_loopback(host):
        raise ConfigError(
            f"refusing to listen on {host} without a token: anybody who can reach it could run "
            "code here; set the variable that --token-env names, for example to the output of "
            "`openssl rand -hex 32`"
        )
    try:
        check_port(port)
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}; choose another") from None
    listening.listen(_BACKLOG)
    return listening


def _bind_unix(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)  # nobody listens there any more
        listening.bind(path)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on {path!r}: {error}; choose another --uds") from None
    listening.listen(_BACKLOG)
    return listening


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Fleet:
    """N workers behind one socket, until a signal or ``stop``.

    Args:
        settings: what they serve.
        listening: the socket that all of them accept from; closed with the fleet.
    """

    def __init__(self, settings: ServingSettings, listening: socket.socket) -> None:
        self._settings = settings
        self._listening = listening
        self._node = secrets.token_hex(4)
        self._stopping = asyncio.Event()
        self.pids: dict[int, int] = {}
        """Process of each worker."""

    def stop(self) -> None:
        """Let ``run`` return once every worker has closed its boxes."""
        self._stopping.set()

    async def run(self, started: Callable[[], None]) -> None:
        """Serve; call ``started`` once every worker does.

        Raises:
            SandboxUnavailable: the backend cannot work here.
            SandboxError: a worker did not start in time.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
            workers = range(self._settings.workers)
            # The workers' end of it closes with this process, however it ends.
            life, ours = os.pipe()
            keepers: list[asyncio.Task[None]] = []
            try:
                first = [self._start(folder, life, worker, 0) for worker in workers]
                processes = await _all(first)
                keepers += [
                    asyncio.create_task(self._keep(folder, life, worker, process))
                    for worker, process in zip(workers, processes, strict=True)
                ]
                started()
                await self._stopping.wait()
            finally:
                self._stopping.set()
                try:
                    await asyncio.gather(*keepers)
                finally:
                    os.close(ours)
                    os.close(life)
                    self._listening.close()

    async def _keep(
        self, folder: str, life: int, worker: int, process: asyncio.subprocess.Process
    ) -> None:
        """Replace a worker whenever it dies, with growing pauses."""
        loop = asyncio.get_running_loop()
        restarts, pause_s, since = 0, _FIRST_PAUSE_S, loop.time()
        while True:
            await self._until_end(process)
            if self._stopping.is_set():
                return
            pause_s = _FIRST_PAUSE_S if loop.time() - since > _SOUND_AFTER_S else pause_s
            restarts += 1
            _say(
                f"worker {worker} ended with {process.returncode}; its sandboxes are gone, "
                f"starting another in {pause_s:g} s"
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            since = loop.time()
            try:
                process = await self._start(folder, life, worker, restarts)
            except SandboxError as error:
                _say(f"worker {worker}: {error}")

    async def _until_end(self, process: asyncio.subprocess.Process) -> None:
        """Wait for a worker's end; once stopping, only so long, then kill it."""
        end = asyncio.ensure_future(process.wait())
        stop = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({end, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not end.done():
            await _end(process, end)

    async def _start(
        self, folder: str, life: int, worker: int, restarts: int
    ) -> asyncio.subprocess.Process:
        try:
            ready, told = os.pipe()
        except OSError as error:
            raise _no_process(error) from None
        task = {
            "settings": self._settings.dump(),
            "node": self._node,
            "worker": worker,
            "restarts": restarts,
            "folder": folder,
            "listen_fd": self._listening.fileno(),
            "life_fd": life,
            "ready_fd": told,
        }
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agentrl.sandbox.serving.worker", json.dumps(task)),
                pass_fds=(self._listening.fileno(), life, told),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is the parent's to hand on
            )
        except OSError as error:  # the system has no room for another one now
            os.close(ready)
            raise _no_process(error) from None
        finally:
            os.close(told)
        self.pids[worker] = process.pid
        try:
            async with asyncio.timeout(_START_S):
                word = await _read_all(ready)
            message = json.loads(word or b"{}")
        except TimeoutError:
            message = {"error": f"it did not start within {_START_S:g} s"}
        finally:
            os.close(ready)
        if "ready" in message:
            return process
        await _end(process, asyncio.ensure_future(process.wait()))
        reason = message.get("error", f"it ended with code {process.returncode} at its start")
        raise SandboxUnavailable(f"the sandbox server cannot serve: {reason}")


def _no_process(error: OSError) -> SandboxUnavailable:
    return SandboxUnavailable(f"no process of the sandbox server could be started: {error}")


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()


async def _end(process: asyncio.subprocess.Process, end: asyncio.Future[int]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    done, _ = await asyncio.wait({end}, timeout=_STOP_S)
    if not done:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await end


async def _all(
    starts: Sequence[Coroutine[Any, Any, asyncio.subprocess.Process]],
) -> list[asyncio.subprocess.Process]:
    """Wait for every start; if one fails, end those that did not, and raise its error."""
    results = await asyncio.gather(*starts, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        for process in results:
            if not isinstance(process, BaseException):
                await _end(process, asyncio.ensure_future(process.wait()))
        raise errors[0]
    return [result for result in results if not isinstance(result, BaseException)]


async def _read_all(fd: int) -> bytes:
    """Read a pipe to its end without a thread that could stay behind."""
    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)
    data = b""
    while True:
        readable = loop.create_future()
        loop.add_reader(fd, lambda f=readable: f.done() or f.set_result(None))
        try:
            await readable
        finally:
            loop.remove_reader(fd)
        chunk = os.read(fd, 4096)
        if not chunk:
            return data
        data += chunk
