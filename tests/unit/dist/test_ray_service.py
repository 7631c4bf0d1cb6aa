"""Replicas of a service on real Ray: shared load, lost and hanging processes, errors."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

import pytest

import agentrl.dist.ray_service as service_module
from agentrl.dist.config import PoolConfig
from agentrl.dist.ray_cluster import ray_cluster
from agentrl.dist.ray_service import ServiceClient, ServicePool
from agentrl.errors import ConfigError, RewardError, RewardServiceError, WorkerTimeout

T = TypeVar("T")
pytestmark = pytest.mark.timeout(180)


class Echo:
    """Says which process answered."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.is_open = False

    async def open(self) -> None:
        if self.broken:
            raise ConfigError("no such model")
        self.is_open = True

    async def who(self, wait_s: float = 0.0) -> int:
        assert self.is_open
        await asyncio.sleep(wait_s)
        return os.getpid()

    async def refuse(self) -> None:
        raise RewardError("a template refuses the conversation")

    async def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ray_cluster(num_cpus=4):
        yield


@pytest.fixture
def pools() -> Iterator[list[ServicePool]]:
    opened: list[ServicePool] = []
    yield opened
    for pool in opened:
        pool.close()


@pytest.fixture(scope="module")
def pair(cluster: None) -> Iterator[ServiceClient]:
    """Two replicas; a rollout worker gets its client pickled."""
    pool = ServicePool("echoes", Echo, PoolConfig(ranks=2))
    client = asyncio.run(pool.start(timeout_s=60))
    yield pickle.loads(pickle.dumps(client))
    pool.close()


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 120))


def echoes(pools: list[ServicePool], *, ranks: int, cpus: float = 1.0, **how: Any) -> ServicePool:
    settings = PoolConfig(ranks=ranks, cpus_per_rank=cpus)
    pools.append(ServicePool("echoes", partial(Echo, **how), settings))
    return pools[-1]


async def ask(client: ServiceClient, method: str, *arguments: Any) -> Any:
    return await client.ask(method, *arguments, patience_s=30)


def test_slow_answers_are_waited_for_while_the_replica_lives(pair: ServiceClient) -> None:
    assert run(pair.ask("who", 1.0, patience_s=0.2))


def test_errors_of_the_service_come_as_they_were_raised(pair: ServiceClient) -> None:
    with pytest.raises(RewardError, match="a template refuses") as caught:
        run(ask(pair, "refuse"))
    assert type(caught.value) is RewardError


def test_a_cancelled_question_frees_its_replica(pair: ServiceClient) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(ask(pair, "who", 60.0))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        pids = await asyncio.gather(*(ask(pair, "who", 0.2) for _ in range(4)))
        assert sorted(map(pids.count, set(pids))) == [2, 2]

    run(main())


def test_questions_are_shared_and_a_lost_replica_is_replaced(pair: ServiceClient) -> None:
    async def main() -> None:
        pids = await asyncio.gather(*(ask(pair, "who", 0.2) for _ in range(6)))
        assert sorted(map(pids.count, set(pids))) == [3, 3]
        asked = [asyncio.ensure_future(ask(pair, "who", 1.0)) for _ in range(2)]
        await asyncio.sleep(0.5)
        os.kill(pids[0], signal.SIGKILL)
        assert set(await asyncio.gather(*asked)) == {pids[1]}  # its question went to the other
        fresh: set[int] = set()
        for _ in range(100):
            fresh = set(await asyncio.gather(*(ask(pair, "who", 0.1) for _ in range(2))))
            if len(fresh) == 2:
                break
            await asyncio.sleep(0.2)
        assert len(fresh) == 2 and pids[0] not in fresh

    run(main())


def test_a_replica_that_hangs_is_an_error_of_the_service_and_is_replaced(
    pools: list[ServicePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "PING_TIMEOUT_S", 1.0)

    async def main() -> None:
        client = await echoes(pools, ranks=1).start(timeout_s=60)
        before = await ask(client, "who")
        with pytest.raises(RewardServiceError, match="echoes: replica 0 does not answer for 1 s"):
            await client.ask("stop", patience_s=0.5)
        monkeypatch.setattr(service_module, "PING_TIMEOUT_S", 60.0)
        for _ in range(100):
            try:
                assert await ask(client, "who") != before
                return
            except RewardServiceError:
                await asyncio.sleep(0.2)
        pytest.fail("the replica was not replaced")

    run(main())


def test_a_service_that_cannot_open_says_why(pools: list[ServicePool]) -> None:
    with pytest.raises(ConfigError, match="no such model"):
        run(echoes(pools, ranks=1, broken=True).start(timeout_s=60))


def test_a_pool_that_the_cluster_has_no_room_for_is_refused_in_time(
    pools: list[ServicePool],
) -> None:
    with pytest.raises(WorkerTimeout, match="2 replicas with 3 CPUs and 0 GPUs each"):
        run(echoes(pools, ranks=2, cpus=3.0).start(timeout_s=1))
