"""Starts replicas, looks whether they live, and replaces those that do not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum

from agentrl.errors import EngineError, EngineLost
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.serving.config import ServingConfig
from agentrl.rollout.serving.turn import Turn
from agentrl.types import Generation

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0
"""For an engine to close; then it is left behind."""
LOSS_GRACE_S = 1.0
"""For a lost engine to fail its own requests, with the tokens that had arrived of them."""
MAX_PAUSE_S = 60.0
"""Longest pause before a restart."""
_MAX_DOUBLINGS = 64
"""Of a pause; more of them would be no number."""


class State(StrEnum):
    """What a replica can do."""

    STARTING = "starting"
    ARMING = "arming"
    """It was started again, and may be given the weights of the policy."""
    UNARMED = "unarmed"
    """It runs, without the weights of the policy, and gets them with the next update."""
    SERVING = "serving"
    LOST = "lost"
    """It is being replaced."""
    GONE = "gone"
    """It stays away."""


@dataclass(slots=True, eq=False)
class Replica:
    """A place for an engine, whichever process fills it."""

    number: int
    engine: RolloutEngine | None = None
    state: State = State.STARTING
    requests: int = 0
    """That it works at, or is about to."""
    calls: dict[asyncio.Task[Generation], Turn] = field(default_factory=dict)
    losses_in_row: int = 0
    """Without a turn that was served between them."""

    @property
    def runs(self) -> bool:
        """Whether there is an engine to talk to."""
        return self.state in (State.ARMING, State.UNARMED, State.SERVING)


Spawn = Callable[[int], RolloutEngine]
"""Number of a replica -> an engine that is not started yet."""


class Supervisor:
    """The replicas of a set.

    Args:
        spawn: makes an engine.
        num_replicas: of them.
        arm: called with a replica that has just been started again, in state ``ARMING``: gives it
            the weights of the policy, or sets it ``UNARMED``. Raises EngineLost where it died.
        on_change: called after every change of a state.
        on_lost: called with the number of a replica whose cache is gone.
    """

    def __init__(
        self,
        spawn: Spawn,
        num_replicas: int,
        config: ServingConfig,
        *,
        arm: Callable[[Replica], Awaitable[None]],
        on_change: Callable[[], None],
        on_lost: Callable[[int], None],
    ) -> None:
        self.replicas = [Replica(number) for number in range(num_replicas)]
        self.num_restarts = 0
        self.last_loss = ""
        self._spawn = spawn
        self._config = config
        self._arm = arm
        self._on_change = on_change
        self._on_lost = on_lost
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start every replica at once, and begin to look after them.

        Raises:
            EngineError: one did not start; the others are closed.
        """
        opening = [asyncio.ensure_future(self._open(replica)) for replica in self.replicas]
        try:
            engines = await asyncio.gather(*opening)
        except BaseException:
            for task in opening:
                task.cancel()
            ended = await asyncio.gather(*opening, return_exceptions=True)
            await asyncio.gather(*(_close(e) for e in ended if not isinstance(e, BaseException)))
            raise
        for replica, engine in zip(self.replicas, engines, strict=True):
            replica.engine = engine
            self.set_state(replica, State.UNARMED)
        self._keep(self._watch())

    async def close(self) -> None:
        """Close every replica. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        engines = [item.engine for item in self.replicas if item.engine is not None]
        for replica in self.replicas:
            replica.engine = None
            replica.state = State.GONE
        await asyncio.gather(*(_close(engine) for engine in engines))

    async def _open(self, replica: Replica) -> RolloutEngine:
        engine = self._spawn(replica.number)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await engine.start()
        except TimeoutError:
            await _close(engine)
            raise EngineError(
                f"replica {replica.number} did not start within rollout.serving.start_timeout_s="
                f"{self._config.start_timeout_s:g} s; raise it, or look at the engine's own log"
            ) from None
        except BaseException:
            await _close(engine)
            raise
        return engine

    def _keep(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ states

    def set_state(self, replica: Replica, state: State) -> None:
        """Change what a replica can do, and tell everyone who waits for that."""
        replica.state = state
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    def running(self) -> list[Replica]:
        """Return the replicas that have an engine to talk to."""
        return [replica for replica in self.replicas if replica.runs]

    @property
    def hopeful(self) -> bool:
        """Whether a replica serves, or may do so without being told anything."""
        return any(replica.state not in (State.UNARMED, State.GONE) for replica in self.replicas)

    async def some_running(self) -> list[Replica]:
        """Wait until a replica runs; returns all that do, none where all stay away."""
        while not self.running() and self.hopeful:
            await self._changed.wait()
        return self.running()

    def hold_restarts(self, hold: bool) -> None:
        """Start no replica while others sleep: what they gave away is in use."""
        if hold:
            self._may_start.clear()
        else:
            self._may_start.set()

    # ------------------------------------------------------------------ losses

    def lost(self, replica: Replica, engine: RolloutEngine, error: EngineError) -> None:
        """Begin to replace an engine, once, whoever notices first that it is gone."""
        if replica.engine is not engine or not replica.runs:
            return
        logger.warning("replica %d is lost: %s", replica.number, error)
        self.last_loss = f"replica {replica.number}: {error}"
        replica.losses_in_row += 1
        self._on_lost(replica.number)
        self.set_state(replica, State.LOST)
        self._keep(self._replace(replica, engine))

    async def _replace(self, replica: Replica, engine: RolloutEngine) -> None:
        if replica.calls:
            await asyncio.wait(list(replica.calls), timeout=LOSS_GRACE_S)
        for call in replica.calls:
            call.cancel()
        await _close(engine)
        while self.num_restarts < self._config.max_restarts:
            self.num_restarts += 1
            doublings = min(replica.losses_in_row - 1, _MAX_DOUBLINGS)
            pause_s = self._config.restart_pause_s * 2.0**doublings
            await asyncio.sleep(min(pause_s, MAX_PAUSE_S))
            await self._may_start.wait()
            try:
                engine = await self._open(replica)
            except Exception as error:  # whatever keeps it from starting may pass
                logger.warning("replica %d did not start again: %s", replica.number, error)
                self.last_loss = f"replica {replica.number}: {error}"
                replica.losses_in_row += 1
                continue
            replica.engine = engine
            self.set_state(replica, State.ARMING)
            await self._armed(replica)
            return
        replica.engine = None
        self.set_state(replica, State.GONE)

    async def _armed(self, replica: Replica) -> None:
        engine = replica.engine
        assert engine is not None
        try:
            await self._arm(replica)
        except EngineLost as error:
            self.lost(replica, engine, error)
        except Exception as error:  # of no use as it is, and nobody else would say so
            self.lost(replica, engine, EngineLost(f"{type(error).__name__}: {error}"))

    def arm_again(self, replica: Replica) -> None:
        """Have a replica armed in the background that could not be when it was started."""
        if replica.runs:
            self._keep(self._armed(replica))

    async def _watch(self) -> None:
        """Look after the replicas until cancelled."""
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            await asyncio.gather(*(self._look(replica) for replica in self.running()))

    async def _look(self, replica: Replica) -> None:
        engine = replica.engine
        assert engine is not None
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                await engine.check_health()
        except EngineLost as error:
            self.lost(replica, engine, error)
        except TimeoutError:
            limit_s = self._config.health_timeout_s
            message = f"no answer to a health check within health_timeout_s={limit_s:g} s"
            self.lost(replica, engine, EngineLost(message))
        except Exception as error:  # whatever it is, the others are looked after
            logger.warning("replica %d: health check: %s", replica.number, error)


async def _close(engine: RolloutEngine) -> None:
    """Close an engine that may be broken, and go on.

    Who is cancelled waits for it: an engine closes once, and what is left of it then stays.
    """
    closing = asyncio.ensure_future(_close_within_limit(engine))
    try:
        await asyncio.shield(closing)
    except asyncio.CancelledError:
        await asyncio.wait([closing])
        raise


async def _close_within_limit(engine: RolloutEngine) -> None:
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await engine.close()
    except Exception as error:
        logger.warning("an engine did not close: %s: %s", type(error).__name__, error)
