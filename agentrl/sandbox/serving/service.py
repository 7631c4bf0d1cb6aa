"""The boxes of one worker and what can be asked of them, apart from HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from dataclasses import asdict
from typing import Any

from agentrl.errors import ConfigError, SandboxError, ToolError
from agentrl.kwargs import check_kwargs
from agentrl.sandbox.base import Sandbox
from agentrl.sandbox.pool import SandboxPool
from agentrl.sandbox.registry import sandbox_registry
from agentrl.sandbox.serving import wire
from agentrl.sandbox.serving.leases import Leases, UnknownSandbox
from agentrl.sandbox.serving.metrics import CallCounts
from agentrl.sandbox.serving.settings import ServingSettings


class SandboxService:
    """A backend, its pool and the leases of one worker.

    Args:
        settings: of the whole server.
        node: names this server in ids, so that a request sent to another one is told apart.
        worker: number of this worker.
        restarts: how often this worker was replaced so far.
    """

    def __init__(
        self, settings: ServingSettings, *, node: str = "", worker: int = 0, restarts: int = 0
    ) -> None:
        self.settings = settings
        self.node = node or secrets.token_hex(4)
        self.worker = worker
        self.calls = CallCounts()
        self._restarts = restarts
        factory = sandbox_registry.get(settings.backend)
        check_kwargs(factory, settings.backend_kwargs, key="backend_kwargs")
        self._pool = SandboxPool(
            factory(**settings.backend_kwargs),
            max_open=math.ceil(settings.max_open / settings.workers),
            create_timeout_s=settings.create_timeout_s,
        )
        self.leases = Leases(f"{self.node}-{worker}", settings.ttl_s)
        self._reaping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the backend; raises :class:`SandboxUnavailable` if it cannot work here."""
        await self._pool.start()
        self._reaping = asyncio.create_task(self.leases.reap_forever())

    async def close(self) -> None:
        """Close every box and the backend. Idempotent."""
        if self._reaping is not None:
            self._reaping.cancel()
            await asyncio.gather(self._reaping, return_exceptions=True)
        await self.leases.close()
        await self._pool.close()

    async def create(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open a box; return its id, its limits, and which of them were lowered.

        Raises:
            ConfigError: limits that are none.
            SandboxError: no box could be had in time.
        """
        asked = wire.parse_limits(request.get("limits", {}))
        limits, lowered = wire.clamp(asked, self.settings.maxima)
        box = await self._pool.acquire(limits)
        return {
            "id": self.leases.add(box),
            "url": self.settings.advertise_url,
            "ttl_s": self.settings.ttl_s,
            "limits": asdict(limits),
            "lowered": lowered,
            "max_timeout_s": self.settings.maxima.wall_s,
        }

    async def call(
        self, box_id: str, operation: str, request: dict[str, Any], body: bytes
    ) -> bytes:
        """Do one operation on a box; return the frame of its answer.

        Raises:
            UnknownSandbox: there is no such box.
            ConfigError: the request is none that this operation takes.
            ToolError, SandboxError: as the box raises them.
        """
        start, outcome = time.perf_counter(), "cancelled"
        try:
            async with self.leases.use(box_id) as box:
                frame, outcome = await self._operate(box, operation, request, body)
            return frame
        except UnknownSandbox:
            outcome = "unknown"
            raise
        except (ToolError, ConfigError):
            outcome = "refused"
            raise
        except SandboxError:
            outcome = "failed"
            raise
        finally:
            self.calls.add(operation, outcome, time.perf_counter() - start)

    async def close_box(self, box_id: str) -> None:
        """Close a box; one that is unknown is closed already."""
        with contextlib.suppress(SandboxError):
            await self.leases.remove(box_id)

    def report(self) -> dict[str, Any]:
        """How the backend enforces each limit, and what this server allows."""
        return {
            "report": asdict(self._pool.backend.report()),
            "maxima": asdict(self.settings.maxima),
            "ttl_s": self.settings.ttl_s,
        }

    def snapshot(self) -> dict[str, Any]:
        """Counts for the metrics page."""
        counts = self._pool.counts
        return {
            "open": len(self.leases),
            "created": counts.created,
            "closed": counts.closed - self.leases.reaped,
            "reaped": self.leases.reaped,
            "leaked": counts.leaked,
            "create_failures": counts.infra_errors,
            "restarts": self._restarts,
            "calls": self.calls.snapshot(),
        }

    async def _operate(
        self, box: Sandbox, operation: str, request: dict[str, Any], body: bytes
    ) -> tuple[bytes, str]:
        if operation == "read":
            return wire.pack({}, await box.read(_text(request, "path"))), "ok"
        if operation == "write":
            await box.write(_text(request, "path"), body)
            return wire.pack({}), "ok"
        timeout_s = self._timeout(request)
        if operation == "run_code":
            result = await box.run_code(_code(body), timeout_s=timeout_s)
        elif operation == "run_private":
            result = await box.run_private(_text(request, "source"), body, timeout_s=timeout_s)
        else:
            argv = request.get("argv")
            if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
                raise ConfigError("exec needs argv, a list of strings")
            result = await box.exec(argv, stdin=body, timeout_s=timeout_s)
        return wire.pack_result(result), result.status.value

    def _timeout(self, request: dict[str, Any]) -> float | None:
        timeout_s, most = request.get("timeout_s"), self.settings.maxima.wall_s
        if timeout_s is None:
            return None
        if type(timeout_s) not in (int, float) or not 0 < timeout_s <= most:
            raise ConfigError(
                f"timeout_s must be a number of seconds above 0 and at most {most:g}, this "
                f"server's maximum of wall_s, got {timeout_s!r:.80}"
            )
        return timeout_s


def _code(body: bytes) -> str:
    try:
        return body.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the code is no UTF-8: {error}") from None


def _text(request: dict[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"the request needs {name!r}, a string")
    return value
