"""The sandbox backends that the contract holds for, and how each is built on this machine.

An arm opens a backend that is not yet started, with whatever it needs around it. It raises
:class:`ArmUnavailable`, saying why, where this machine cannot run it; a machine on which CI runs
(root, with apt) can run all.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest
from agentrl_sandboxes.docker import DockerBackend
from agentrl_sandboxes.docker.image import build_local_image
from agentrl_sandboxes.local import LocalBackend
from remote_sandboxes import e2b_backend, serving

from agentrl.errors import SandboxUnavailable
from agentrl.sandbox.base import SandboxBackend

T = TypeVar("T")

_ENGINE = Path(__file__).parents[2] / "scripts" / "docker_engine.sh"
_CANNOT_RUN_HERE = 3
"""Exit code with which the engine's script says so."""

UNTIL_TESTS_END = ExitStack()
"""What several files use; closed when the tests of this process have ended."""


class ArmUnavailable(Exception):
    """This machine cannot run an arm; the message is the reason."""


@dataclass(slots=True, kw_only=True)
class Arm:
    """How a backend is built here, shared and with infrastructure of its own."""

    open: Callable[[], AbstractContextManager[SandboxBackend]]
    open_fragile: Callable[[], AbstractContextManager[tuple[SandboxBackend, Callable[[], object]]]]
    """A backend beside all others, and what takes its infrastructure away (from a thread)."""


def cannot_run(what: str, reason: object) -> NoReturn:
    """Skip what this machine cannot run; in CI, which can run all, that is a failure."""
    message = f"{what} cannot run here: {reason}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@dataclass(slots=True, kw_only=True)
class StartedBackend:
    """A started backend, and the event loop it lives on."""

    name: str
    backend: SandboxBackend
    runner: asyncio.Runner
    deadline_s: float = 60.0

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the backend's loop, with a deadline."""

        async def bounded() -> T:
            async with asyncio.timeout(self.deadline_s):
                return await scenario

        return self.runner.run(bounded())


@contextmanager
def started(name: str) -> Iterator[StartedBackend]:
    """Build and start an arm for the body; close it however the body ends."""
    with ARMS[name].open() as backend, asyncio.Runner() as runner:
        arm = StartedBackend(name=name, backend=backend, runner=runner)
        try:
            arm.run(backend.start())
            yield arm
        finally:
            arm.run(backend.close())


def docker_engine() -> str:
    """Return the address of a Docker engine: that of DOCKER_HOST, else one of our own.

    Our own stays up from one file to the next. Several test processes share it; the last one to
    end stops it.
    """
    address = os.environ.get("DOCKER_HOST")
    if address:
        return address
    _use_engine()
    return _control_engine("start")


@cache
def _use_engine() -> None:
    """Keep our own engine from being stopped before this process's tests have ended."""
    UNTIL_TESTS_END.enter_context(_engine_in_use())


@contextmanager
def _engine_in_use() -> Iterator[None]:
    with open(_engine_folder() / "users", "w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield
        finally:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass  # others still use it
            else:
                _control_engine("stop")


def _engine_folder() -> Path:
    folder = Path(os.environ.get("AGENTRL_DOCKER_DIR", "/run/agentrl-docker"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except PermissionError:
        raise ArmUnavailable(
            f"no Docker engine: DOCKER_HOST is not set, and this user cannot keep one in {folder}"
        ) from None
    return folder


def _control_engine(verb: str, folder: str | None = None) -> str:
    own = {} if folder is None else {"AGENTRL_DOCKER_DIR": folder}
    done = subprocess.run(
        [str(_ENGINE), verb],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **own},
    )
    if done.returncode == _CANNOT_RUN_HERE:
        raise ArmUnavailable(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def _open_local() -> Iterator[SandboxBackend]:
    """Bubblewrap on this machine."""
    yield LocalBackend()


@contextmanager
def _open_fragile_local() -> Iterator[tuple[SandboxBackend, Callable[[], object]]]:
    """Its infrastructure is the zygote."""
    backend = LocalBackend()

    def lose() -> None:
        assert backend._zygote is not None
        os.kill(backend._zygote.inner_pid, signal.SIGKILL)

    yield backend, lose


@contextmanager
def _open_docker() -> Iterator[SandboxBackend]:
    """Containers of an engine on this machine, from an image of this machine's Python."""
    address = docker_engine()
    image = build_local_image(base_url=address)
    yield DockerBackend(base_url=address, image=image, idle_boxes=2)


@contextmanager
def _open_fragile_docker() -> Iterator[tuple[SandboxBackend, Callable[[], object]]]:
    """An engine beside the one that others use."""
    _engine_folder()
    folder = tempfile.mkdtemp(prefix="agentrl-", dir="/run")  # a socket's path has to be short
    try:
        address = _control_engine("start", folder)
        image = build_local_image(base_url=address)
        backend = DockerBackend(base_url=address, image=image, idle_boxes=0)
        yield backend, lambda: _control_engine("stop", folder)
    finally:
        _control_engine("stop", folder)
        shutil.rmtree(folder)


@contextmanager
def _open_http() -> Iterator[SandboxBackend]:
    """A sandbox server on this machine, with two workers over bubblewrap."""
    with serving("--workers", "2") as server:
        yield server.backend()


@contextmanager
def _open_fragile_http() -> Iterator[tuple[SandboxBackend, Callable[[], object]]]:
    """Its infrastructure is the server."""
    with serving("--workers", "1") as server:
        yield server.backend(create_timeout_s=5.0), server.process.kill


@contextmanager
def _open_e2b() -> Iterator[SandboxBackend]:
    """E2B's official SDK against a stand-in for the service."""
    with ExitStack() as stack:
        yield _enter_e2b(stack)


@contextmanager
def _open_fragile_e2b() -> Iterator[tuple[SandboxBackend, Callable[[], object]]]:
    """Its infrastructure is the stand-in."""
    with ExitStack() as stack:
        yield _enter_e2b(stack), stack.close


def _enter_e2b(stack: ExitStack) -> SandboxBackend:
    try:
        return stack.enter_context(e2b_backend())
    except SandboxUnavailable as error:
        raise ArmUnavailable(str(error)) from None


def kill_first_process(marker: str) -> None:
    """Kill the first process of the box in which a command has this word, as the kernel might."""
    namespaces = {
        _pid_namespace(pid)
        for pid in _pids()
        if marker.encode() in _read(f"/proc/{pid}/cmdline").split(b"\0")
    } - {_pid_namespace(os.getpid())}
    (namespace,) = namespaces
    for pid in _pids():
        numbers = re.search(rb"^NSpid:(.*)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
        if numbers is None or numbers[1].split()[-1] != b"1":
            continue
        if _pid_namespace(pid) == namespace:
            os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


ARMS: dict[str, Arm] = {
    "local": Arm(open=_open_local, open_fragile=_open_fragile_local),
    "docker": Arm(open=_open_docker, open_fragile=_open_fragile_docker),
    "http": Arm(open=_open_http, open_fragile=_open_fragile_http),
    "e2b": Arm(open=_open_e2b, open_fragile=_open_fragile_e2b),
}
