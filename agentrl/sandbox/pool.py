"""Bounding and counting the sandboxes of a run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.errors import SandboxError
from agentrl.sandbox.base import Sandbox, SandboxBackend, SandboxLimits


@dataclass(slots=True, kw_only=True)
class SandboxCounts:
    """What became of the sandboxes so far."""

    created: int = 0
    closed: int = 0
    leaked: int = 0
    """Closing failed or took too long; the backend's own close ends these."""
    infra_errors: int = 0
    """No sandbox could be created in time."""


class SandboxPool:
    """Hands out fresh sandboxes of one backend, at most `max_open` at a time.

    Args:
        backend: not yet started; the pool starts and closes it.
        max_open: sandboxes that may be open at once; further callers wait.
        max_creating: creations in flight at once, so that a burst does not stall the machine.
        create_timeout_s: how long a caller may wait for a place and a sandbox together.
        close_timeout_s: how long closing one may take before it counts as leaked.
    """

    def __init__(
        self,
        backend: SandboxBackend,
        *,
        max_open: int = 512,
        max_creating: int = 16,
        create_timeout_s: float = 30.0,
        close_timeout_s: float = 10.0,
    ) -> None:
        self.backend = backend
        self.counts = SandboxCounts()
        self._places = asyncio.Semaphore(max_open)
        self._creating = asyncio.Semaphore(max_creating)
        self._create_timeout_s = create_timeout_s
        self._close_timeout_s = close_timeout_s
        self._starting = asyncio.Lock()
        self._started = False

    @property
    def open(self) -> int:
        """Sandboxes handed out and not yet closed."""
        return self.counts.created - self.counts.closed - self.counts.leaked

    async def start(self) -> None:
        """Start the backend, once; raises :class:`SandboxUnavailable` if it cannot work here."""
        async with self._starting:
            if not self._started:
                await self.backend.start()
                self._started = True

    async def close(self) -> None:
        """Close the backend, and with it whatever is still open."""
        await self.backend.close()

    async def __aenter__(self) -> SandboxPool:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    async def acquire(self, limits: SandboxLimits | None = None) -> Sandbox:
        """Return a fresh sandbox whose ``close`` gives its place back. Starts the backend.

        Raises:
            SandboxUnavailable: the backend cannot work on this machine.
            SandboxError: none could be created within the deadline.
        """
        await self.start()
        return _Placed(await self._create(limits or SandboxLimits()), self._close)

    @asynccontextmanager
    async def box(self, limits: SandboxLimits) -> AsyncIterator[Sandbox]:
        """A fresh sandbox for the body of an `async with`; closed however the body ends.

        Raises:
            SandboxError: none could be created within the deadline.
        """
        sandbox = await self._create(limits)
        try:
            yield sandbox
        finally:
            await self._close(sandbox)

    async def _create(self, limits: SandboxLimits) -> Sandbox:
        place = False
        try:
            async with asyncio.timeout(self._create_timeout_s):
                await self._places.acquire()
                place = True
                async with self._creating:
                    sandbox = await self.backend.create(limits)
        except BaseException as error:
            if place:
                self._places.release()
            if isinstance(error, TimeoutError):
                self.counts.infra_errors += 1
                raise SandboxError(
                    f"no sandbox within {self._create_timeout_s:g} s ({self.open} are open); "
                    "raise sandbox.max_open or sandbox.create_timeout_s"
                ) from None
            if isinstance(error, SandboxError):
                self.counts.infra_errors += 1
            raise
        self.counts.created += 1
        return sandbox

    async def _close(self, sandbox: Sandbox) -> None:
        try:
            async with asyncio.timeout(self._close_timeout_s):
                await sandbox.close()
        except (TimeoutError, SandboxError, OSError):
            self.counts.leaked += 1
        except BaseException:
            self.counts.leaked += 1
            raise
        else:
            self.counts.closed += 1
        finally:
            self._places.release()


class _Placed:
    """A sandbox that holds a place in the pool until it is closed."""

    def __init__(
        self, sandbox: Sandbox, release: Callable[[Sandbox], Coroutine[Any, Any, None]]
    ) -> None:
        self._sandbox = sandbox
        self._release = release
        self._closing: asyncio.Future[None] | None = None
        self.run_code = sandbox.run_code
        self.run_private = sandbox.run_private
        self.exec = sandbox.exec
        self.read = sandbox.read
        self.write = sandbox.write

    async def close(self) -> None:
        """Close the sandbox and give its place back. Idempotent; never raises.

        Goes on where its caller is cancelled.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._release(self._sandbox))
        await asyncio.shield(self._closing)
