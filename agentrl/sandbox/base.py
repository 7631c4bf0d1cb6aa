"""What a sandbox is: a place where untrusted code runs, with limits, and nothing left behind.

A backend (bubblewrap, Docker, E2B, …) implements :class:`SandboxBackend`; everything else sees
only :class:`Sandbox`. A sandbox is used by one trajectory, or by one grading, and then closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable


class SandboxStatus(StrEnum):
    """How one execution inside a sandbox ended."""

    OK = "ok"
    ERROR = "error"
    """The code raised, or the command exited non-zero."""
    TIMEOUT = "timeout"
    OOM = "oom"
    PIDS_LIMIT = "pids_limit"
    OUTPUT_LIMIT = "output_limit"
    STATE_LOST = "state_lost"
    """The interpreter was replaced: variables of earlier cells are gone."""
    SANDBOX_DEAD = "sandbox_dead"
    INFRA_ERROR = "infra_error"
    """Our side failed: never counted against the model."""


@dataclass(slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one sandbox. A backend reports with which mechanism it enforces each."""

    wall_s: float = 5.0
    """Seconds one execution may take before it is ended."""
    cpu_s: float = 30.0
    """CPU seconds over the life of a process in the sandbox."""
    memory_mb: int = 256
    max_processes: int = 32
    disk_mb: int = 32
    """Size of the work directory, and again of the scratch directory."""
    output_bytes: int = 65_536
    """Bytes kept of stdout and of stderr, each; the rest is cut and its size reported."""


@dataclass(slots=True, kw_only=True)
class ExecResult:
    """The outcome of one execution."""

    status: SandboxStatus
    stdout: str = ""
    stderr: str = ""
    result: str | None = None
    """`repr` of a cell's trailing expression, if it had one that is not None."""
    error: str | None = None
    """Traceback of the cell, or the reason of a status other than ok."""
    exit_code: int | None = None
    truncated_bytes: int = 0
    """Bytes of output that were cut away."""
    private: bytes = b""
    """What trusted code wrote to the private descriptor (see :meth:`Sandbox.run_private`)."""
    duration_s: float = 0.0
    state_lost: bool = False
    """Names of earlier cells are gone: the interpreter was replaced, in or before this call."""


@runtime_checkable
class Sandbox(Protocol):
    """One isolated interpreter with a work directory of its own. No network."""

    async def run_code(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run a Python cell; names stay defined for the next cell.

        A failure of the code is a status, never an exception.

        Raises:
            SandboxError: the sandbox is closed or cannot be reached.
        """
        ...

    async def run_private(
        self, source: str, payload: bytes, *, timeout_s: float | None = None
    ) -> ExecResult:
        """Run a trusted program in a fresh interpreter process of this sandbox.

        ``source`` sees ``PAYLOAD: bytes`` and ``reply(data: bytes) -> None``, which writes to a
        descriptor that only the host reads; the result is in :attr:`ExecResult.private`.
        stdout and stderr of code that the program runs never reach that descriptor.
        """
        ...

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = None
    ) -> ExecResult:
        """Run a command in the work directory."""
        ...

    async def read(self, path: str) -> bytes:
        """Read a file of the work directory. Paths are resolved inside the sandbox only.

        Raises:
            ToolError: there is no such regular file, or the path leads out of the sandbox.
            SandboxError: the sandbox is closed or cannot be reached.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file of the work directory, making its folders.

        Paths are resolved inside the sandbox only.

        Raises:
            ToolError: the path leads out of the sandbox, or the disk is full.
            SandboxError: the sandbox is closed or cannot be reached.
        """
        ...

    async def close(self) -> None:
        """Kill every process and free everything. Idempotent, safe after a crash.

        Raises:
            SandboxError: whoever holds the sandbox could not be told; it ends by its own lease.
        """
        ...


class SandboxBackend(Protocol):
    """Creates sandboxes. Started once per process, shared by all trajectories."""

    async def start(self) -> None:
        """Prepare the backend.

        Raises:
            SandboxUnavailable: it cannot work here; the message holds the command that fixes it.
        """
        ...

    async def create(self, limits: SandboxLimits) -> Sandbox:
        """Return a fresh sandbox in which nothing of an earlier one is visible.

        Raises:
            SandboxError: no sandbox could be created within the backend's own deadline.
        """
        ...

    async def close(self) -> None:
        """Close every sandbox that is still open, then the backend. Idempotent."""
        ...

    def report(self) -> SandboxReport:
        """Say how each limit is enforced on this machine, as read back after start."""
        ...


@dataclass(slots=True, kw_only=True)
class SandboxReport:
    """Which mechanism enforces each limit, and which isolation holds."""

    backend: str
    isolation: tuple[str, ...] = ()
    limits: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class SandboxProvider(Protocol):
    """Where tools and graders get sandboxes from (the pool of the run)."""

    async def acquire(self, limits: SandboxLimits | None = None) -> Sandbox:
        """Return a fresh sandbox; the caller closes it.

        Raises:
            SandboxUnavailable: no backend works here.
            SandboxError: none could be had before the deadline.
        """
        ...
