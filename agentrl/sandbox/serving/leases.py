"""The boxes of one worker, and the end of those whose client is gone."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl.errors import SandboxError
from agentrl.sandbox.base import Sandbox

logger = logging.getLogger(__name__)


class UnknownSandbox(SandboxError):
    """No box of that id lives in this worker."""


@dataclass(slots=True)
class _Lease:
    box: Sandbox
    expires_at: float
    calls: int = 0


class Leases:
    """Boxes by an id that cannot be guessed and begins with the name of their worker.

    A lease lasts ``ttl_s`` from the end of the last call, or from the last ``renew``; a box in use
    is never reaped, since every call has a deadline of its own.
    """

    def __init__(self, place: str, ttl_s: float) -> None:
        self.reaped = 0
        """Boxes that were closed because their client was not heard of."""
        self._place = place
        self._ttl_s = ttl_s
        self._leases: dict[str, _Lease] = {}

    def __len__(self) -> int:
        """Boxes open now."""
        return len(self._leases)

    def add(self, box: Sandbox) -> str:
        """Take a box over; return its id."""
        box_id = f"{self._place}-{secrets.token_urlsafe(24)}"
        self._leases[box_id] = _Lease(box, self._now() + self._ttl_s)
        return box_id

    @asynccontextmanager
    async def use(self, box_id: str) -> AsyncIterator[Sandbox]:
        """Hold a box for the length of a call.

        Raises:
            UnknownSandbox: it was closed, has expired, or never was.
        """
        lease = self._leases.get(box_id)
        if lease is None:
            raise UnknownSandbox(
                "the server knows no such sandbox: it is closed, its lease ran out, or the "
                "worker that held it was restarted"
            )
        lease.calls += 1
        try:
            yield lease.box
        finally:
            lease.calls -= 1
            lease.expires_at = self._now() + self._ttl_s

    def renew(self, box_ids: Iterable[str]) -> list[str]:
        """Extend leases; return the ids that are unknown."""
        lost = []
        for box_id in box_ids:
            lease = self._leases.get(box_id)
            if lease is None:
                lost.append(box_id)
            else:
                lease.expires_at = self._now() + self._ttl_s
        return lost

    async def remove(self, box_id: str) -> bool:
        """Close a box; False if there is none of that id."""
        lease = self._leases.pop(box_id, None)
        if lease is None:
            return False
        await lease.box.close()
        return True

    async def reap(self) -> None:
        """Close what has expired."""
        now = self._now()
        expired = [
            box_id
            for box_id, lease in self._leases.items()
            if lease.calls == 0 and lease.expires_at <= now
        ]
        self.reaped += len(expired)
        ends = await asyncio.gather(
            *(self.remove(box_id) for box_id in expired), return_exceptions=True
        )
        for error in ends:  # must not keep the next ones from their end
            if isinstance(error, Exception):
                logger.warning("closing a sandbox whose lease ran out failed: %r", error)

    async def reap_forever(
        self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        """Reap until cancelled, often enough that no box outlives its lease by half of it."""
        while True:
            await sleep(min(self._ttl_s / 4, 15.0))
            await self.reap()

    async def close(self) -> None:
        """Close every box."""
        await asyncio.gather(*(self.remove(box_id) for box_id in list(self._leases)))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
