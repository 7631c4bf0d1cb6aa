"""Handing a request to the worker that holds its box.

Any worker may accept any request, since all listen on one socket. An id names its worker, and
each worker also listens on a unix socket that only the server's own processes can reach.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from httpx_aiohttp import AiohttpTransport

from agentrl.errors import SandboxError
from agentrl.sandbox.serving.wire import FORWARDED

_COUNTS_S = 3.0


class PeerLost(SandboxError):
    """The worker that holds a box does not answer: it died, and its boxes with it."""


def peer_socket(folder: str, worker: int) -> str:
    """Return where a worker listens for the others."""
    return str(Path(folder, f"{worker}.sock"))


class Peers:
    """The workers of one server, as seen from one of them.

    Args:
        folder: holds the unix socket of each.
        own: number of this worker; workers: how many there are.
    """

    def __init__(self, folder: str, own: int, workers: int) -> None:
        self.own = own
        self.workers = workers
        self._folder = folder
        self._clients: dict[int, httpx.AsyncClient] = {}
        # Each worker starts its rounds elsewhere: a lone client need not meet the same first.
        self._turns = itertools.count(random.randrange(workers))

    def next(self) -> int:
        """Return the worker whose turn it is to create a box."""
        return next(self._turns) % self.workers

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.gather(*(client.aclose() for client in self._clients.values()))

    async def forward(
        self, worker: int, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> httpx.Response:
        """Ask a worker what this one was asked. The deadline is the caller's.

        Raises:
            PeerLost: it is gone, or went while it was at it.
        """
        kept = {n: v for n, v in headers.items() if n in ("authorization", "content-type")}
        try:
            return await self._client(worker).request(
                method, path, headers={**kept, FORWARDED: "1"}, content=body
            )
        except httpx.HTTPError:
            raise PeerLost(
                f"worker {worker} of this sandbox server died, and its sandboxes with it"
            ) from None

    async def counts(self, headers: Mapping[str, str]) -> dict[int, dict[str, Any] | None]:
        """Return what each other worker has counted; None for one that does not answer."""

        async def of(worker: int) -> dict[str, Any] | None:
            try:
                async with asyncio.timeout(_COUNTS_S):
                    answer = await self.forward(worker, "GET", "/v1/counts", headers, b"")
                return answer.json() if answer.status_code == 200 else None
            except (TimeoutError, PeerLost, ValueError):
                return None

        others = [worker for worker in range(self.workers) if worker != self.own]
        return dict(zip(others, await asyncio.gather(*map(of, others)), strict=True))

    def _client(self, worker: int) -> httpx.AsyncClient:
        if worker not in self._clients:
            transport = AiohttpTransport(
                uds=peer_socket(self._folder, worker), limits=httpx.Limits(max_connections=0)
            )
            self._clients[worker] = httpx.AsyncClient(
                transport=transport, base_url="http://peer", timeout=None, trust_env=False
            )
        return self._clients[worker]
