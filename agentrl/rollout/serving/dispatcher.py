"""Takes requests to replicas and brings back turns, whatever happens to the engines meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress

from agentrl.errors import EngineError, EngineLost
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.serving.config import ServingConfig
from agentrl.rollout.serving.idle_order import IdleOrder
from agentrl.rollout.serving.line import WaitingLine
from agentrl.rollout.serving.routing import Load, Router
from agentrl.rollout.serving.stats import ServingStats
from agentrl.rollout.serving.supervisor import Replica, State, Supervisor
from agentrl.rollout.serving.turn import Turn
from agentrl.types import GenerateRequest, Generation

ABORT_AGAIN_S = 1.0
"""Until a drain that interrupts tells engines again: a request may have been on its way there."""

_Place = tuple[Replica, int | None]
"""Who serves a turn, and the other replica that served its session before, if any."""


class Dispatcher:
    """The requests of a replica set.

    Args:
        supervisor: keeps the replicas.
        router: chooses among them.
        stats: gets the counts.
        nobody: returns why no replica will ever serve as things are; None where one may.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        router: Router,
        config: ServingConfig,
        stats: ServingStats,
        *,
        nobody: Callable[[], EngineError | None],
    ) -> None:
        self._supervisor = supervisor
        self._router = router
        self._config = config
        self._stats = stats
        self._nobody = nobody
        self._line: WaitingLine[_Place] = WaitingLine()
        self._tickets = itertools.count()
        self._idle_order = IdleOrder(supervisor.replicas)
        self._num_requests = 0
        """That replicas work at, or are about to."""
        self._turns: set[Turn] = set()
        self._sessions: dict[str, set[Turn]] = {}
        self._gate_open = True
        self._idle = asyncio.Event()

    @property
    def num_turns(self) -> int:
        """Turns that are unfinished, whether or not a replica works at them."""
        return len(self._turns)

    @property
    def num_waiting(self) -> int:
        """Turns without a replica."""
        return len(self._line)

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one turn, on as many replicas as it takes; see :class:`ReplicaSet`."""
        if (error := self._nobody()) is not None:
            raise error
        turn, ticket = Turn(request), next(self._tickets)
        self._turns.add(turn)
        self._sessions.setdefault(request.session_id, set()).add(turn)
        scope = asyncio.timeout(self._config.request_timeout_s)
        try:
            async with scope:
                while not turn.ended:
                    await self._next_leg(turn, ticket)
        except TimeoutError:
            if not scope.expired():
                raise
            raise EngineError(
                f"session {request.session_id!r}: {turn.num_tokens} of at most "
                f"{request.sampling.max_tokens} tokens came within rollout.serving."
                f"request_timeout_s={self._config.request_timeout_s:g} s, waiting included; raise "
                "it, or lower rollout.concurrency or rollout.max_turn_tokens"
            ) from None
        finally:
            self._left(turn)
        generation = turn.generation()
        self._stats.count(len(request.prompt_ids), generation)
        return generation

    async def end_session(self, session_id: str) -> None:
        """End what is unfinished of a session as aborted, and forget it."""
        for turn in list(self._sessions.get(session_id, ())):
            self._end(turn)
        home = self._router.home_of(session_id)
        self._router.end_session(session_id)
        if home is not None:
            await self._forget(home, session_id)

    async def abort(self, session_id: str | None) -> int:
        """End a session's request, or all; see :class:`ReplicaSet`."""
        found = self._turns if session_id is None else self._sessions.get(session_id, ())
        turns = set(found)
        for turn in turns:
            self._end(turn)
        await asyncio.sleep(0)  # those that were given an engine in this moment are there now
        for replica in self._supervisor.running():
            if turns & set(replica.calls.values()):
                await self._tell_abort(replica, session_id)
        return len(turns)

    def _left(self, turn: Turn) -> None:
        session = turn.request.session_id
        self._turns.discard(turn)
        self._sessions[session].discard(turn)
        if not self._sessions[session]:
            del self._sessions[session]

    def _end(self, turn: Turn) -> None:
        turn.aborted = True
        if self._line.send_away(turn):
            turn.give_up()

    # ------------------------------------------------------------------ one leg of a turn

    async def _next_leg(self, turn: Turn, ticket: int) -> None:
        """Wait for a replica and let it go on with a turn."""
        place = self._line.join(turn, ticket)
        self.serve_line()
        try:
            found = await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._release(place.result())
            raise
        if found is None:  # aborted while it waited
            return
        replica, previous = found
        try:
            if previous is not None:
                await self._forget(previous, turn.request.session_id)
            if turn.aborted:  # since it was given its place: no engine was told
                turn.give_up()
            elif replica.state is State.SERVING:
                await self._run(turn, replica)
        finally:
            self._release(found)

    async def _run(self, turn: Turn, replica: Replica) -> None:
        engine, task = replica.engine, asyncio.current_task()
        assert engine is not None and task is not None
        call = asyncio.ensure_future(engine.generate(turn.next_request()))
        replica.calls[call] = turn
        try:
            part = await call
        except EngineError as error:
            lost = await _as_lost(error, engine)
            if lost is None:
                raise
            self._on_loss(turn, replica, engine, lost)
        except asyncio.CancelledError:
            if task.cancelling():
                raise
            # The supervisor ended the call: the engine is gone, and had left the call hanging.
            self._on_loss(turn, replica, engine, EngineLost("it was taken for lost"))
        else:
            interrupted = turn.interrupted
            turn.add(part)
            replica.losses_in_row = 0
            self._stats.continuations += interrupted and not turn.ended
        finally:
            del replica.calls[call]

    def _on_loss(
        self, turn: Turn, replica: Replica, engine: RolloutEngine, error: EngineLost
    ) -> None:
        self._supervisor.lost(replica, engine, error)
        self._stats.replays += 1
        turn.lost(error.partial)
        if turn.num_lost > self._config.max_replays and not turn.ended:
            raise EngineLost(
                f"session {turn.request.session_id!r}: {turn.num_lost} replicas were lost under "
                f"this request, the last one with: {error}; the request itself may end them"
            )

    async def _forget(self, number: int, session_id: str) -> None:
        """Have a replica forget a session, if it still lives."""
        replica = self._supervisor.replicas[number]
        engine = replica.engine
        if not replica.runs or engine is None:
            return
        try:
            await engine.end_session(session_id)
        except EngineLost as error:
            self._supervisor.lost(replica, engine, error)

    async def _tell_abort(self, replica: Replica, session_id: str | None = None) -> None:
        engine = replica.engine
        if engine is None:
            return
        try:
            await engine.abort(session_id)
        except EngineLost as error:
            self._supervisor.lost(replica, engine, error)

    # ------------------------------------------------------------------ admission

    def replicas_changed(self) -> None:
        """Take note of the states of the replicas, and serve those who wait."""
        self._idle_order.rebuild()
        self.serve_line()

    def serve_line(self) -> None:
        """Give replicas to those who wait, as far as there is room."""
        if not self._gate_open:
            return
        self._line.serve(self._place)
        if self._line.any_waits and self._nobody() is not None:
            self.fail_line(lambda: self._nobody() or EngineError("no replica serves"))

    def fail_line(self, error: Callable[[], EngineError]) -> None:
        """Raise an error in all who wait."""
        self._line.fail(error)

    def _place(self, turn: Turn) -> _Place | None:
        before = self._router.home_of(turn.request.session_id)
        loads = {
            replica.number: Load(
                requests=replica.requests, room=self._config.max_requests - replica.requests
            )
            for replica in self._candidates(self._router.home(turn.request))
        }
        number = self._router.choose(turn.request, loads)
        if number is None:
            return None
        replica = self._supervisor.replicas[number]
        replica.requests += 1
        self._num_requests += 1
        self._idle_order.note(replica)
        return replica, before if before != number else None

    def _release(self, place: _Place | None) -> None:
        if place is None:
            return
        place[0].requests -= 1
        self._num_requests -= 1
        self._idle_order.note(place[0])
        if not self._num_requests:
            self._idle.set()
        self.serve_line()

    def _candidates(self, home: int | None) -> Iterator[Replica]:
        """Yield the replicas that the rule of routing chooses from: the idlest, and the home."""
        if (idlest := self._idle_order.idlest()) is not None:
            yield idlest
        if home is not None and self._supervisor.replicas[home].state is State.SERVING:
            yield self._supervisor.replicas[home]

    # ------------------------------------------------------------------ the gate

    def shut(self) -> None:
        """Start no request until :meth:`open`."""
        self._gate_open = False

    def open(self) -> None:
        """Start requests again, those that waited first."""
        self._gate_open = True
        self.serve_line()

    async def drain(self, *, interrupt: bool) -> None:
        """Wait until every call to every engine has returned; the gate is shut.

        Args:
            interrupt: abort them; turns that have not ended by themselves go on afterwards.

        Raises:
            EngineError: some had not after ``drain_timeout_s``.
        """
        limit_s = self._config.drain_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.sleep(0)  # those that were given an engine in this moment are there
                while self._num_requests:
                    if interrupt:
                        await self._interrupt()
                    self._idle.clear()
                    if self._num_requests:
                        await _wait(self._idle, ABORT_AGAIN_S if interrupt else None)
        except TimeoutError:
            counts = {item.number: item.requests for item in self._supervisor.replicas}
            raise EngineError(
                f"requests are still unfinished after rollout.serving.drain_timeout_s={limit_s:g} "
                f"s (replica: requests {counts}); raise it, or set "
                "rollout.serving.interrupt_updates=true"
            ) from None

    async def _interrupt(self) -> None:
        busy = [replica for replica in self._supervisor.running() if replica.calls]
        for replica in busy:
            for turn in replica.calls.values():
                turn.interrupted = True
        await asyncio.gather(*(self._tell_abort(replica) for replica in busy))


async def _as_lost(error: EngineError, engine: RolloutEngine) -> EngineLost | None:
    """Tell a lost engine from a refused request."""
    if isinstance(error, EngineLost):
        return error
    try:
        await engine.check_health()
    except EngineLost as found:
        return found
    except EngineError:
        pass
    return None


async def _wait(event: asyncio.Event, limit_s: float | None) -> None:
    """Wait for an event, or for so long."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await event.wait()
