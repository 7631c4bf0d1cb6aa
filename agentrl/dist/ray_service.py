"""A service on Ray: replicas of one object in actors, asked by whoever holds a client.

Not a worker group: replicas know nothing of each other, any process may ask any of them at any
time, and the failure of one is an error of the question that it was asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.dist.config import PoolConfig
from agentrl.dist.rollout_worker import ProcessSetup
from agentrl.errors import AgentRLError, RewardServiceError, WorkerLost, WorkerTimeout
from agentrl.types import Message

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Lost processes of a replica that Ray replaces."""
PING_TIMEOUT_S = 60.0
"""A replica that does not answer an empty call for so long hangs, and is replaced."""
_MAX_CONCURRENCY = 10_000


class Service(Protocol):
    """What a replica holds. Its coroutines are called by name; they keep their own deadlines."""

    async def open(self) -> None:
        """Load what is needed. Called again in a process that replaces a lost one."""
        ...


MakeService = Callable[[], Service]
"""Can be pickled: it is called in the replica's process."""


class _Replica:
    """The actor."""

    def __init__(self, make: MakeService, setup: ProcessSetup) -> None:
        setup.apply(may_stay=True)
        self._service = make()
        self._opening = asyncio.Lock()
        self._is_open = False

    async def open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self._service.open()
                self._is_open = True

    async def ask(self, method: str, arguments: tuple[Any, ...]) -> Any:
        await self.open()
        return await getattr(self._service, method)(*arguments)

    async def ping(self) -> None:
        pass


@dataclass(slots=True)
class ServiceClient:
    """Asks the replica that this process has asked least of just now. Can be pickled.

    Args:
        name: of the service, for messages.
        replicas: handles of Ray.
    """

    name: str
    replicas: list[Any]
    _open: dict[int, int] = field(default_factory=dict, init=False)
    """Index of a replica -> questions that it has not answered."""

    def __getstate__(self) -> tuple[str, list[Any]]:
        """Leave this process's counts here."""
        return self.name, self.replicas

    def __setstate__(self, state: tuple[str, list[Any]]) -> None:
        """Start counting."""
        self.name, self.replicas = state
        self._open = {}

    async def ask(self, method: str, *arguments: Any, patience_s: float) -> Any:
        """Return what ``method`` of the service answers; a lost replica's question goes to another.

        Args:
            patience_s: how long to wait before asking whether the replica still answers at all. The
                service itself keeps the deadlines of its work.

        Raises:
            RewardServiceError: every replica was lost, or hangs.
            AgentRLError: what the service raised.
        """
        tried: set[int] = set()
        while True:
            index = self._least_loaded(tried)
            tried.add(index)
            self._open[index] = self._open.get(index, 0) + 1
            try:
                return await self._ask(index, method, arguments, patience_s)
            except (WorkerLost, WorkerTimeout) as error:
                if len(tried) == len(self.replicas):
                    raise RewardServiceError(
                        f"{self.name}: {error}; {len(tried)} of {len(self.replicas)} replicas were "
                        "asked. Look for what ended it (out of memory?) in Ray's logs"
                    ) from error
                logger.warning("%s: %s; asking another replica", self.name, error)
            finally:
                self._open[index] -= 1

    def _least_loaded(self, tried: set[int]) -> int:
        free = [index for index in range(len(self.replicas)) if index not in tried]
        return min(free, key=lambda index: (self._open.get(index, 0), index))

    async def _ask(
        self, index: int, method: str, arguments: tuple[Any, ...], patience_s: float
    ) -> Any:
        replica = self.replicas[index]
        reference = replica.ask.remote(method, arguments)
        answer = asyncio.ensure_future(_answer(reference, f"replica {index}"))
        try:
            while not (await asyncio.wait((answer,), timeout=patience_s))[0]:
                await self._refuse_hanging(index)
            return answer.result()
        except BaseException:
            if not answer.done():
                answer.cancel()
                ray.cancel(reference)
            raise

    async def _refuse_hanging(self, index: int) -> None:
        """Have a replica replaced that does not answer at all.

        Raises:
            WorkerTimeout: it did not.
        """
        replica = self.replicas[index]
        pong = asyncio.ensure_future(_answer(replica.ping.remote(), f"replica {index}"))
        if not (await asyncio.wait((pong,), timeout=PING_TIMEOUT_S))[0]:
            pong.cancel()
            ray.kill(replica, no_restart=False)
            raise WorkerTimeout(f"replica {index} does not answer for {PING_TIMEOUT_S:g} s")
        pong.result()


@dataclass(slots=True, frozen=True)
class RewardModelClient:
    """Reward models in a pool: a :class:`~agentrl.reward.service.ScoringService`."""

    client: ServiceClient

    async def score(
        self, part: str, messages: Sequence[Message], *, timeout_s: float
    ) -> dict[str, float]:
        """Score a conversation; see :meth:`agentrl.reward.service.ScoringService.score`."""
        asked = (part, list(messages), timeout_s)
        return await self.client.ask("score", *asked, patience_s=timeout_s)


async def _answer(reference: Any, label: str) -> Any:
    """Await Ray's reference; raises errors as they were raised, a lost process as WorkerLost."""
    try:
        return await reference
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise WorkerLost(f"{label} is gone: {str(error).splitlines()[0]}") from error


class ServicePool:
    """The replicas of a service, started and ended together. One process owns it.

    Args:
        name: of the service, for messages.
        make: makes the service in a replica's process.
        pool: how many replicas, and what each of them needs.
    """

    def __init__(self, name: str, make: MakeService, pool: PoolConfig) -> None:
        self._name = name
        self._make = make
        self._pool = pool
        self._group: Any = None
        self._replicas: list[Any] = []

    async def start(self, *, timeout_s: float) -> ServiceClient:
        """Start every replica and open its service.

        Raises:
            WorkerTimeout: not all of them were open in time.
            WorkerLost: a process ended meanwhile.
            AgentRLError: what the service raised.
        """
        try:
            await asyncio.wait_for(self._start(), timeout_s)
        except TimeoutError:
            self.close()
            raise WorkerTimeout(
                f"{self._name}: {self._pool.ranks} replicas with {self._pool.cpus_per_rank:g} CPUs "
                f"and {self._pool.gpus_per_rank:g} GPUs each were not open within {timeout_s:g} s: "
                "the cluster may lack them (`ray status` tells), or the model takes longer to load"
            ) from None
        except BaseException:
            self.close()
            raise
        return ServiceClient(self._name, list(self._replicas))

    async def _start(self) -> None:
        pool = self._pool
        need = {"CPU": pool.cpus_per_rank, "GPU": pool.gpus_per_rank}
        bundle = {kind: amount for kind, amount in need.items() if amount}
        self._group = placement_group([bundle] * pool.ranks, strategy=pool.strategy)
        await self._group.ready()
        actor = ray.remote(_Replica)
        self._replicas = [
            actor.options(
                num_cpus=pool.cpus_per_rank,
                num_gpus=pool.gpus_per_rank,
                max_restarts=MAX_RESTARTS,
                max_concurrency=_MAX_CONCURRENCY,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote(self._make, ProcessSetup.of_this_process())
            for index in range(pool.ranks)
        ]
        opening = (
            _answer(replica.open.remote(), f"{self._name}: replica {index}")
            for index, replica in enumerate(self._replicas)
        )
        await asyncio.gather(*opening)

    def close(self) -> None:
        """End every process. Idempotent; never raises."""
        for replica in self._replicas:
            _quietly(lambda replica=replica: ray.kill(replica))
        self._replicas = []
        if self._group is not None:
            _quietly(lambda: remove_placement_group(self._group))
            self._group = None


def _quietly(action: Callable[[], Any]) -> None:
    try:
        action()
    except (RayError, GetTimeoutError, AgentRLError, ValueError) as error:
        logger.debug("while closing: %s", error)
