"""The sandbox backends that the contract holds for, and how each is built on this machine.

An arm is a context manager that yields a backend not yet started, with whatever it needs around
it. It raises :class:`ArmUnavailable`, saying why, where this machine cannot run it; a machine on
which CI runs (root, with apt) can run all.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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


class ArmUnavailable(Exception):
    """This machine cannot run an arm; the message is the reason."""


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
    with ARMS[name]() as backend, asyncio.Runner() as runner:
        arm = StartedBackend(name=name, backend=backend, runner=runner)
        try:
            arm.run(backend.start())
            yield arm
        finally:
            arm.run(backend.close())


@contextmanager
def docker_engine() -> Iterator[str]:
    """The address of a Docker engine: that of DOCKER_HOST, else one of our own for the body.

    Several test processes share our own; the last one to leave stops it.
    """
    address = os.environ.get("DOCKER_HOST")
    if address:
        yield address
        return
    with open(_engine_folder() / "users", "w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        address = _control_engine("start")
        try:
            yield address
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


def _control_engine(verb: str) -> str:
    done = subprocess.run([str(_ENGINE), verb], capture_output=True, text=True, timeout=600)
    if done.returncode == _CANNOT_RUN_HERE:
        raise ArmUnavailable(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextmanager
def local_arm() -> Iterator[SandboxBackend]:
    """Bubblewrap on this machine."""
    yield LocalBackend()


@contextmanager
def docker_arm() -> Iterator[SandboxBackend]:
    """Containers of an engine on this machine, from an image of this machine's Python."""
    with docker_engine() as address:
        image = build_local_image(base_url=address)
        yield DockerBackend(base_url=address, image=image, idle_boxes=2)


@contextmanager
def http_arm() -> Iterator[SandboxBackend]:
    """A sandbox server on this machine, with two workers over bubblewrap."""
    with serving("--workers", "2") as server:
        yield server.backend()


@contextmanager
def e2b_arm() -> Iterator[SandboxBackend]:
    """E2B's official SDK against a stand-in for the service."""
    with ExitStack() as stack:
        try:
            backend = stack.enter_context(e2b_backend())
        except SandboxUnavailable as error:
            raise ArmUnavailable(str(error)) from None
        yield backend


ARMS: dict[str, Callable[[], AbstractContextManager[SandboxBackend]]] = {
    "local": local_arm,
    "docker": docker_arm,
    "http": http_arm,
    "e2b": e2b_arm,
}
