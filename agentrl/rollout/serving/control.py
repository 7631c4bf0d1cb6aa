"""What concerns all replicas at once, while none works at a request: weights, and sleep."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from agentrl.errors import ChannelOutdated, EngineError, EngineLost
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.serving.config import ServingConfig
from agentrl.rollout.serving.dispatcher import Dispatcher
from agentrl.rollout.serving.publish import Publisher, on_each
from agentrl.rollout.serving.supervisor import Replica, State, Supervisor
from agentrl.weights.served import ServedWeights, WeightSpec, refuse_other_weights

if TYPE_CHECKING:
    import torch

    from agentrl.weights.channels.base import Address
    from agentrl.weights.plan import BucketPlan
    from agentrl.weights.push import WeightSink

logger = logging.getLogger(__name__)

Republish = Callable[[RolloutEngine], Awaitable[ServedWeights]]
"""Gives an engine the weights that were published last; returns what it serves then."""
_JOIN_ANY_TIME = ("shm", "cuda_ipc")
"""Transports of weights that a receiver may join after others."""


class Control:
    """Weights and sleep of the replicas of a set.

    Args:
        republish, bucket_bytes: see :class:`~agentrl.rollout.serving.replica_set.ReplicaSet`.

    Attributes:
        version: of the weights that are served.
        broken: why nobody serves since an update failed.
        sleep_level: 0 while awake.
        num_updates: weight updates so far.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        config: ServingConfig,
        republish: Republish | None,
        *,
        bucket_bytes: int,
    ) -> None:
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        self._config = config
        self._republish = republish
        self._publisher = Publisher(timeout_s=config.update_timeout_s, bucket_bytes=bucket_bytes)
        self._lock = asyncio.Lock()
        self._served: ServedWeights | None = None
        """What the last update published; None before the first."""
        self._specs: Sequence[WeightSpec] = ()
        self._late: set[Replica] = set()
        """Started again while the others slept."""
        self._channel: tuple[BucketPlan, Address] | None = None
        self._receivers: dict[Replica, RolloutEngine] = {}
        """That opened the channel."""
        self._update: AsyncExitStack | None = None
        """Holds the gate shut while an owner sends buckets."""
        self.version = 0
        self.broken: str | None = None
        self.sleep_level = 0
        self.num_updates = 0

    @property
    def busy(self) -> bool:
        """Whether something is under way after which replicas may serve."""
        return self._lock.locked()

    def started(self) -> None:
        """Let those serve that came up with weights; others wait for an update."""
        first = engine_of(self._supervisor.replicas[0])
        self._specs = first.weight_specs()
        self.version = first.policy_version
        for replica in self._supervisor.running():
            if engine_of(replica).policy_version >= 0:
                self._supervisor.set_state(replica, State.SERVING)

    def close(self) -> None:
        """Close the channel to the replicas. Idempotent."""
        self._publisher.close()

    @asynccontextmanager
    async def no_requests(self, *, interrupt: bool | None = None) -> AsyncIterator[None]:
        """Hold the gate shut, with nothing unfinished in any engine."""
        interrupt = bool(self._config.interrupt_updates) if interrupt is None else interrupt
        try:
            async with self._lock:
                self._dispatcher.shut()
                await self._dispatcher.drain(interrupt=interrupt)
                yield
        finally:
            if not self.sleep_level and not self._lock.locked():
                self._dispatcher.open()

    # ------------------------------------------------------------------ weights, from here

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return what every replica serves; known once started."""
        return self._specs

    async def update(
        self,
        params: Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        interrupt: bool | None,
    ) -> ServedWeights:
        """Replace the weights of every replica."""
        self._refuse_asleep()
        async with self.no_requests(interrupt=interrupt):
            replicas = await self._loadable(version)
            try:
                engines = [engine_of(replica) for replica in replicas]
                self._receivers = {}  # an engine has one channel
                results = await self._publisher.publish(engines, params, version)
                return self._take_served(replicas, engines, results, version)
            except BaseException as error:
                self._break(version, error)
                raise

    def _refuse_asleep(self) -> None:
        """Refuse an update that would wait for replicas of which none is started meanwhile."""
        if self.sleep_level:
            raise EngineError("the replicas are asleep; await wake() before an update")

    async def _loadable(self, version: int | None) -> list[Replica]:
        """Return the replicas that weights can be loaded into; none of them serves any more."""
        replicas = await self._supervisor.some_running()
        if not replicas:
            raise EngineLost(
                f"no replica is left to load weights; the last loss: {self._supervisor.last_loss}"
            )
        for replica in replicas:
            replica.state = State.UNARMED
        self.broken = "the last weight update was given up half way; push weights again"
        return replicas

    def _break(self, version: int | None, error: BaseException) -> None:
        name = "" if version is None else f" to version {version}"
        self.broken = (
            f"no replica serves, since the weight update{name} failed: "
            f"{type(error).__name__}: {error}"
        )

    def _take_served(
        self,
        replicas: Sequence[Replica],
        engines: Sequence[RolloutEngine],
        results: Sequence[ServedWeights | EngineLost],
        version: int,
    ) -> ServedWeights:
        """Let those serve that hold the weights.

        Args:
            engines: that the results are of; a lost one may have been replaced since.
        """
        served: list[tuple[Replica, ServedWeights]] = []
        for replica, engine, result in zip(replicas, engines, results, strict=True):
            if isinstance(result, EngineLost):
                self._supervisor.lost(replica, engine, result)
            else:
                served.append((replica, result))
        if not served:
            raise EngineLost(
                f"every replica was lost while it loaded version {version}: "
                f"{self._supervisor.last_loss}; push the weights again"
            )
        reference = served[0][1]
        if reference.version != version:
            raise EngineError(
                f"stale policy: after the update to version {version} replica "
                f"{served[0][0].number} says it samples version {reference.version}"
            )
        for replica, other in served[1:]:
            refuse_other_weights(reference, other, where=f"replica {replica.number}")
        self.broken = None
        self._served, self.version = reference, version
        self.num_updates += 1
        for replica, _ in served:
            if replica.state is State.UNARMED:  # or it was lost meanwhile
                self._supervisor.set_state(replica, State.SERVING)
        return reference

    # ------------------------------------------------------------------ weights, by a channel

    @property
    def num_receivers(self) -> int:
        """Processes of all running replicas that open a channel; 0 where they take no buckets."""
        engines = [engine_of(replica) for replica in self._supervisor.running()]
        return sum(getattr(engine, "num_receivers", 0) for engine in engines)

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """Have every running replica open a channel, as do those that are started later."""
        self._channel = plan, address
        self._receivers = {}
        await self._join(self._supervisor.running())

    async def _join(self, replicas: Sequence[Replica]) -> None:
        """Have replicas open the channel that have not."""
        assert self._channel is not None
        plan, address = self._channel
        new = [item for item in replicas if self._receivers.get(item) is not item.engine]
        if new:
            self._publisher.forget_connections()
        engines = [engine_of(item) for item in new]
        results = await on_each(engines, lambda engine: _sink(engine).connect(plan, address))
        for replica, engine, result in zip(new, engines, results, strict=True):
            if isinstance(result, EngineLost):
                self._supervisor.lost(replica, engine, result)
            else:
                self._receivers[replica] = engine

    async def begin_update(self) -> None:
        """Shut the gate until :meth:`finish_update`; see ``WeightSink``."""
        if self._channel is None:
            raise EngineError("the replicas have no channel of weights; await connect() first")
        self._refuse_asleep()
        if self._update is None:  # else the update before was given up
            stack = AsyncExitStack()
            await stack.enter_async_context(self.no_requests())
            self._update = stack
        async with self._or_give_up(None):
            replicas = await self._loadable(None)
            transport = self._channel[1].transport
            same = all(self._receivers.get(item) is item.engine for item in replicas)
            if transport not in _JOIN_ANY_TIME and (
                not same or len(replicas) != len(self._receivers)
            ):
                raise ChannelOutdated(
                    f"replicas were replaced since weights were connected by {transport}, which "
                    "none can join later; open a new sender and connect again"
                )
            await self._join(replicas)
            await self._on_sinks(lambda sink: sink.begin_update())

    async def load_bucket(self, index: int) -> None:
        """Load a bucket into every replica."""
        async with self._or_give_up(None):
            await self._on_sinks(lambda sink: sink.load_bucket(index))

    async def finish_update(self, version: int) -> ServedWeights:
        """Let the replicas serve what was loaded, and open the gate."""
        async with self._or_give_up(version):
            replicas = [item for item in self._receivers if item.state is State.UNARMED]
            engines = [engine_of(item) for item in replicas]
            results = await on_each(engines, lambda engine: _sink(engine).finish_update(version))
            served = self._take_served(replicas, engines, results, version)
        await self._leave_update()
        return served

    async def give_up_update(self, reason: str) -> None:
        """Open the gate where an update was under way: whoever waits is told why nobody serves."""
        if self._update is None:
            return
        self._break(None, EngineError(reason))
        try:
            await self._on_sinks(lambda sink: sink.give_up_update(reason))
        except EngineError as error:
            logger.warning("a replica did not hear that an update was given up: %s", error)
        finally:
            await self._leave_update()

    async def _on_sinks(self, call: Callable[[WeightSink], Awaitable[None]]) -> None:
        replicas = [item for item in self._receivers if item.state is State.UNARMED]
        if not replicas:
            raise EngineLost(
                f"every replica was lost in the update; the last: {self._supervisor.last_loss}"
            )
        engines = [engine_of(item) for item in replicas]
        results = await on_each(engines, lambda engine: call(_sink(engine)))
        for replica, engine, result in zip(replicas, engines, results, strict=True):
            if isinstance(result, EngineLost):
                self._supervisor.lost(replica, engine, result)

    @asynccontextmanager
    async def _or_give_up(self, version: int | None) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            self._break(version, error)
            await self._leave_update()
            raise

    async def _leave_update(self) -> None:
        stack, self._update = self._update, None
        if stack is not None:
            await stack.aclose()

    # ------------------------------------------------------------------ replaced replicas

    async def arm(self, replica: Replica) -> None:
        """Give a replica that was started again the weights of the policy, if anybody has them."""
        engine = engine_of(replica)
        async with self._lock:
            if replica.engine is not engine or replica.state is not State.ARMING:
                return  # an update was faster
            if self.sleep_level:
                await engine.sleep(self.sleep_level)
                self._late.add(replica)
                return
            holds = await self._holds_policy(replica, engine)
            if replica.engine is not engine or replica.state is not State.ARMING:
                return  # it was lost meanwhile, and is being replaced
            replica.state = State.SERVING if holds else State.UNARMED
        self._supervisor.set_state(replica, replica.state)

    async def _holds_policy(self, replica: Replica, engine: RolloutEngine) -> bool:
        if self._served is None:
            return engine.policy_version == self.version >= 0
        if self._republish is None or self.broken is not None:
            return False
        try:
            async with asyncio.timeout(self._config.update_timeout_s):
                found = await self._republish(engine)
            refuse_other_weights(self._served, found, where=f"replica {replica.number}")
        except EngineLost:
            raise
        except Exception as error:  # the owner's; the next update arms the replica
            logger.warning("replica %d has no weights yet: %s", replica.number, error)
            return False
        return True

    # ------------------------------------------------------------------ sleep

    async def sleep(self, level: int) -> None:
        """Have every replica free what training needs."""
        if self.sleep_level:
            return
        if waiting := self._dispatcher.num_turns:
            raise EngineError(
                f"sleep: {waiting} requests are unfinished; await or abort them first"
            )
        async with self.no_requests():
            self.sleep_level = level
            self._supervisor.hold_restarts(True)
            await self._on_every(lambda engine: engine.sleep(level))
            if level > 1:  # weights may be forgotten: an update comes before the next request
                for replica in self._supervisor.running():
                    replica.state = State.UNARMED

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        if not self.sleep_level:
            return
        async with self._lock:
            await self._on_every(lambda engine: engine.wake())
            self.sleep_level = 0
            self._supervisor.hold_restarts(False)
        late, self._late = self._late, set()
        for replica in late:
            self._supervisor.arm_again(replica)
        self._dispatcher.open()

    async def _on_every(self, call: Callable[[RolloutEngine], Awaitable[None]]) -> None:
        replicas = self._supervisor.running()
        engines = [engine_of(replica) for replica in replicas]
        results = await on_each(engines, call)
        for replica, engine, result in zip(replicas, engines, results, strict=True):
            if isinstance(result, EngineLost):
                self._supervisor.lost(replica, engine, result)


def engine_of(replica: Replica) -> RolloutEngine:
    """Return the engine of a replica that runs."""
    assert replica.engine is not None, f"replica {replica.number} is {replica.state}"
    return replica.engine


def _sink(engine: RolloutEngine) -> WeightSink:
    from agentrl.weights.push import WeightSink

    if not isinstance(engine, WeightSink):
        raise EngineError(
            f"{type(engine).__name__} takes no buckets of weights; use update_weights, or an "
            "engine that does"
        )
    return engine
