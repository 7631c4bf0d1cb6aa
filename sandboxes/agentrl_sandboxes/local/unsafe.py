"""`sandbox.id=none`: the same protocol over a plain process. Chosen by name only.

Code can read and delete every file of the user, use the network and outlive its box by leaving
its process group. Only per-process limits and a kill of the group hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from agentrl.errors import SandboxError
from agentrl.sandbox.base import SandboxLimits, SandboxReport
from agentrl_sandboxes.supervised import inside
from agentrl_sandboxes.supervised.box import SupervisedSandbox
from agentrl_sandboxes.supervised.channel import SocketChannel
from agentrl_sandboxes.supervised.limits import check_limits
from agentrl_sandboxes.supervised.owner import owner_label, owner_lives

# The package's folder is on the path for one import only: programs must not see it.
_MAIN = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.plain import main; "
    "del sys.path[0]; main()"
)
_FOLDER = str(Path(inside.__file__).parents[1])
_PREFIX = "agentrl-unsafe-"
_CREATE_S = 20.0
_EXIT_S = 5.0
_WARNING = (
    "sandbox.id=none: code written by the model runs as an ordinary process of this user, with "
    "its files and its network. Use it for code you trust; `local` isolates."
)


class UnsafeBackend:
    """Plain processes with resource limits, no isolation; warns at every start."""

    def __init__(self) -> None:
        self._boxes: dict[int, SupervisedSandbox] = {}
        self._ids = itertools.count(1)
        self._threads: ThreadPoolExecutor | None = None

    async def start(self) -> None:
        """Warn, and remove what owners left that no longer live."""
        warnings.warn(_WARNING, RuntimeWarning, stacklevel=2)
        self._threads = ThreadPoolExecutor(2, "agentrl-unsafe-sandbox")
        await asyncio.get_running_loop().run_in_executor(self._threads, _sweep_folders)

    async def create(self, limits: SandboxLimits) -> SupervisedSandbox:
        """Start one process with a new temporary directory."""
        check_limits(limits)
        if self._threads is None:
            raise SandboxError("the sandbox backend is not started, or closed")
        loop = asyncio.get_running_loop()
        try:
            near, far = socket.socketpair()
        except OSError as error:
            raise SandboxError(f"no channel for a sandbox: {error}; see `ulimit -n`") from None
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{owner_label()}-"))
        threads, box_id = self._threads, next(self._ids)
        spawning = threads.submit(_spawn, far, limits, folder)
        try:
            process = await asyncio.wrap_future(spawning)
        except asyncio.CancelledError:
            near.close()  # by which it ends, where it has started
            threads.submit(_undo, spawning, far, folder)
            raise
        except OSError as error:
            near.close()
            far.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise SandboxError(f"no process could be started: {error}") from None
        far.close()

        async def release() -> None:
            await loop.run_in_executor(threads, _end, process, folder)
            self._boxes.pop(box_id, None)

        # Closing the channel ends it: the supervisor kills its children's groups, then itself.
        box = SupervisedSandbox(
            SocketChannel(near),
            limits,
            kill=lambda: _shut(near),
            release=release,
            has_witness=False,
        )
        self._boxes[box_id] = box
        try:
            await box.hello(_CREATE_S)
        except BaseException:
            await box.close()
            raise
        return box

    async def close(self) -> None:
        """Close every box."""
        await asyncio.gather(*(box.close() for box in list(self._boxes.values())))
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def report(self) -> SandboxReport:
        """No isolation; limits per process only."""
        return SandboxReport(
            backend="none",
            limits={
                "wall": "supervisor",
                "cpu": "RLIMIT_CPU per process",
                "memory": "RLIMIT_AS per process",
                "output": "supervisor",
                "processes": "not limited",
                "disk": "RLIMIT_FSIZE per file",
            },
            warnings=(_WARNING,),
        )


def _spawn(far: socket.socket, limits: SandboxLimits, folder: Path) -> subprocess.Popen[bytes]:
    work, scratch = folder / "work", folder / "scratch"
    work.mkdir()
    scratch.mkdir()
    arguments = [str(far.fileno()), json.dumps(asdict(limits)), str(work), str(scratch)]
    return subprocess.Popen(
        [sys.executable, "-s", "-c", _MAIN, _FOLDER, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(far.fileno(),),
        cwd=work,
        start_new_session=True,
        env={
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(work),
            "TMPDIR": str(scratch),
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )


def _undo(spawning: Future[subprocess.Popen[bytes]], far: socket.socket, folder: Path) -> None:
    """Clean up after a start that nobody waits for any more, once it is over."""
    try:
        process = spawning.result()
    except (CancelledError, OSError):  # it never began, or failed
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _end(process, folder)
    finally:
        far.close()


def _sweep_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not owner_lives(folder.name.removeprefix(_PREFIX)):
            shutil.rmtree(folder, ignore_errors=True)


def _shut(channel: socket.socket) -> None:
    with contextlib.suppress(OSError):
        channel.shutdown(socket.SHUT_WR)


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    try:
        process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
