from __future__ import annotations

import asyncio

import pytest

from agentrl.sandbox.base import ExecResult, SandboxStatus
from agentrl.sandbox.serving.leases import Leases, UnknownSandbox
from agentrl.testing.sandboxes import FakeSandbox, FakeSandboxes
from agentrl.testing.virtual_time import run_virtual


async def box() -> FakeSandbox:
    return await FakeSandboxes().acquire()


def test_a_box_whose_client_is_silent_is_closed_and_one_that_is_renewed_is_not():
    async def scenario() -> None:
        leases = Leases("node-0", ttl_s=10)
        silent, kept = await box(), await box()
        silent_id, kept_id = leases.add(silent), leases.add(kept)
        reaping = asyncio.create_task(leases.reap_forever())
        for _ in range(4):
            await asyncio.sleep(5)
            leases.renew([kept_id])
        reaping.cancel()
        assert (silent.closed, kept.closed, leases.reaped) == (True, False, 1)
        assert leases.renew([silent_id, kept_id]) == [silent_id]

    run_virtual(scenario())


def test_a_box_in_use_outlives_its_lease_and_gets_a_new_one_afterwards():
    async def scenario() -> None:
        leases = Leases("node-0", ttl_s=10)
        used = await box()
        box_id = leases.add(used)
        async with leases.use(box_id):
            await asyncio.sleep(60)
            await leases.reap()
            assert not used.closed
        await asyncio.sleep(9)
        await leases.reap()
        assert not used.closed
        await asyncio.sleep(2)
        await leases.reap()
        assert used.closed

    run_virtual(scenario())


def test_ids_name_their_worker_cannot_be_guessed_and_end_with_the_box():
    async def scenario() -> None:
        leases = Leases("node-3", ttl_s=10)
        ids = {leases.add(await box()) for _ in range(100)}
        assert len({name[len("node-3-") :][:8] for name in ids}) == 100
        assert all(name.startswith("node-3-") and len(name) >= 39 for name in ids)
        one = ids.pop()
        assert await leases.remove(one) and not await leases.remove(one)
        with pytest.raises(UnknownSandbox):
            async with leases.use(one):
                pass
        await leases.close()
        assert len(leases) == 0

    asyncio.run(scenario())


def test_a_box_that_cannot_be_closed_keeps_no_other_from_its_end():
    class Broken(FakeSandbox):
        async def close(self) -> None:
            raise KeyError("a bug of its backend")

    async def scenario() -> None:
        leases = Leases("node-0", ttl_s=10)
        leases.add(Broken(lambda code: ExecResult(status=SandboxStatus.OK), None))
        reaping = asyncio.create_task(leases.reap_forever())
        await asyncio.sleep(20)
        late = await box()
        leases.add(late)
        await asyncio.sleep(20)
        assert late.closed and not reaping.done()
        reaping.cancel()

    run_virtual(scenario())
