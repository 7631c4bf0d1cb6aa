"""A sandbox backend under attack: what tests of hostile programs share."""

from __future__ import annotations

import asyncio

from host_state import HostState, list_host, restored, settled
from sandbox_arms import StartedBackend

from agentrl.sandbox.base import ExecResult, Sandbox, SandboxLimits, SandboxStatus

ATTACKED = ["local", "docker", "http"]
"""The stand-in for E2B is not among them: what it runs is not isolated."""

LIMITS = SandboxLimits(wall_s=4.0, memory_mb=128, max_processes=16, disk_mb=8)
NEXT_S = 1.0
_ON_THE_WAY_S = 4.0
"""For the way there and back, on a machine whose processors other tests hold."""
OK = SandboxStatus.OK

# Connections that a client keeps for the next request; the local backend has none.
KEPT_CONNECTIONS = {"local": 0, "docker": 12, "http": 12}


class Arena:
    """A backend under attack, and how the host looked before."""

    def __init__(self, arm: StartedBackend) -> None:
        self.arm = arm
        self.settle(LIMITS)

    def settle(self, limits: SandboxLimits) -> None:
        """Take the host as it is now for the state to be restored."""

        async def use_some() -> HostState:
            # Every process of a server holds boxes of these limits in reserve from now on.
            boxes = await asyncio.gather(*(self.open(limits) for _ in range(8)))
            await asyncio.gather(*(box.close() for box in boxes))
            return await settled(self._list)

        self._before = self.arm.run(use_some())
        self._sockets = list_host(self.arm).descriptors.get("socket", 0)

    def check_host(self) -> None:
        """What can be listed of the host must be as before, or become so soon."""
        left = self.arm.run(restored(self._list, self._before))
        assert not left, left
        grown = list_host(self.arm).descriptors.get("socket", 0) - self._sockets
        assert grown <= KEPT_CONNECTIONS[self.arm.name]

    def _list(self) -> HostState:
        state = list_host(self.arm)
        if KEPT_CONNECTIONS[self.arm.name]:
            state.descriptors = {}
        return state

    async def open(self, limits: SandboxLimits = LIMITS) -> Sandbox:
        return await self.arm.backend.create(limits)

    async def check_next(self, box: Sandbox) -> None:
        """An ordinary cell must be answered right, within a deadline of its own."""
        async with asyncio.timeout(NEXT_S + _ON_THE_WAY_S):
            after = await box.run_code("1 + 1", timeout_s=NEXT_S)
        assert (after.status, after.result) == (OK, "2"), after

    def attack(self, code: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run one hostile cell; the box, and a fresh one, must answer ordinary ones next."""

        async def scenario() -> ExecResult:
            box = await self.open()
            try:
                hostile = await box.run_code(code, timeout_s=timeout_s)
                if hostile.status is not SandboxStatus.SANDBOX_DEAD:
                    await self.check_next(box)
            finally:
                await box.close()
            fresh = await self.open()
            try:
                await self.check_next(fresh)
            finally:
                await fresh.close()
            return hostile

        return self.arm.run(scenario())

    def value(self, code: str) -> object:
        """The value of a cell that must run through: what it got hold of, in plain literals."""
        result = self.attack(code)
        assert result.status is OK, result
        return eval(result.result or "None")
