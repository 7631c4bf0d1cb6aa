"""Rollout engines that take the time of real ones and compute nothing.

On the virtual clock of :mod:`agentrl.testing.virtual_time` they show what a schedule is worth, in
CI and at any scale: producer, buffer, agent loop and trainer are the real code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentrl.errors import EngineError, EngineLost
from agentrl.testing import clock_replica
from agentrl.testing.clock_replica import ClockReplica, ReplicaCounts
from agentrl.testing.decode_time import EngineCost
from agentrl.testing.tables import RESPONSE_TOKENS, Table
from agentrl.types import GenerateRequest, Generation, StopReason
from agentrl.weights.served import ServedWeights, WeightSpec

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, frozen=True, kw_only=True)
class ClockSettings:
    """What a :class:`ClockEngine` is like."""

    cost: EngineCost = field(default_factory=EngineCost)
    lengths: Table = RESPONSE_TOKENS
    """Tokens of a turn, picked by the request's seed."""
    num_slots: int = 256
    """Requests decoded at once; more wait."""
    sync_s: float = 0.05
    """Of a weight update, once nothing is unfinished."""
    tokens_per_id: int = 1
    """Tokens of the clock that an id stands for, in prompts, answers and limits: with 64, answers
    of 640 tokens take their time and have 10 ids, so that 100,000 episodes fit into memory."""
    filler_id: int = 10
    """What answers consist of, up to the stop token."""
    drain_timeout_s: float = 600.0
    """Virtual seconds that an update waits for unfinished requests."""


class ClockEngine:
    """One replica of a :class:`~agentrl.rollout.engine.RolloutEngine` on the token clock.

    An answer's length is a function of its seed; its tokens carry the version that was served when
    it began. Keys and values of a session are kept between its turns, until the weights change.

    Attributes:
        policy_version: of the weights that are being sampled.
        num_aborted: requests that were told to stop.
    """

    def __init__(self, settings: ClockSettings | None = None) -> None:
        self.settings = settings or ClockSettings()
        self.policy_version = 0
        self.num_aborted = 0
        self._replica: ClockReplica | None = None
        self._running: dict[str, list[clock_replica.Sequence]] = {}
        self._num_unfinished = 0
        self._cached: dict[str, int] = {}
        self._drained = asyncio.Event()
        self._drained.set()
        self._open = asyncio.Event()
        self._open.set()
        self._asleep = False
        self._gone: Callable[[], EngineError] | None = None

    @property
    def counts(self) -> ReplicaCounts:
        """What was done so far."""
        return self._started.counts

    @property
    def num_unfinished(self) -> int:
        """Requests that have not returned."""
        return self._num_unfinished

    async def start(self) -> None:
        """Begin to serve."""
        loop = asyncio.get_running_loop()
        self._replica = ClockReplica(self.settings.cost, self.settings.num_slots, loop)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Take the time of one turn.

        Raises:
            EngineError: the engine sleeps, is closed, or was never started.
            EngineLost: it was killed.
        """
        await self._open.wait()
        replica = self._serving()
        sampling, scale = request.sampling, self.settings.tokens_per_id
        whole = -(-int(self.settings.lengths.at(sampling.seed)) // scale)
        wanted = max(whole - sampling.first_index, 1)
        cached = min(self._cached.get(request.session_id, 0), len(request.prompt_ids) - 1)
        sequence = clock_replica.Sequence(
            num_prompt=len(request.prompt_ids) * scale,
            num_cached=cached * scale,
            num_tokens=min(wanted, sampling.max_tokens) * scale,
            done=asyncio.get_running_loop().create_future(),
        )
        version = self.policy_version
        self._begin(request.session_id, sequence)
        try:
            replica.submit(sequence)
            num_ids = await sequence.done // scale
        except asyncio.CancelledError:
            if self._gone is None:
                replica.end(sequence)
            raise
        finally:
            self._finish(request.session_id, sequence)
        self._cached[request.session_id] = len(request.prompt_ids) + num_ids
        aborted = num_ids * scale < sequence.num_tokens
        stops = sampling.stop_token_ids if num_ids == wanted and not aborted else ()
        ids = [self.settings.filler_id] * num_ids
        ids[num_ids - len(stops[:1]) :] = stops[:1]
        reason = StopReason.STOP if stops else StopReason.LENGTH
        return Generation(
            ids=ids,
            logprobs=[-0.5] * num_ids,
            policy_version=[version] * num_ids,
            stop_reason=StopReason.ABORT if aborted else reason,
            num_cached_tokens=cached,
        )

    async def end_session(self, session_id: str) -> None:
        """Forget the keys and values of a session."""
        self._cached.pop(session_id, None)

    async def abort(self, session_id: str | None = None) -> int:
        """Stop a session's requests, or all, after the step in progress."""
        replica = self._serving()
        sessions = list(self._running) if session_id is None else [session_id]
        stopped = [sequence for name in sessions for sequence in self._running.get(name, ())]
        for sequence in stopped:
            replica.end(sequence)
        self.num_aborted += len(stopped)
        return len(stopped)

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return none: nothing is computed."""
        return ()

    async def update_weights(
        self, params: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> ServedWeights:
        """Wait until nothing is unfinished, take the time of an update, serve ``version``.

        Requests that come meanwhile wait.

        Raises:
            EngineError: requests were still unfinished at the deadline.
        """
        self._open.clear()
        try:
            await self._drain()
            for _ in params:
                pass
            await asyncio.sleep(self.settings.sync_s)
            self._cached.clear()
            self.policy_version = version
        finally:
            self._open.set()
        return ServedWeights(version=version, sums={})

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self._drained.wait()
        except TimeoutError as error:
            raise EngineError(
                f"{self._num_unfinished} requests were unfinished after "
                f"{self.settings.drain_timeout_s:g} s; abort them before a weight update"
            ) from error

    async def sleep(self, level: int = 1) -> None:
        """Serve nothing until :meth:`wake`.

        Raises:
            EngineError: requests are unfinished.
        """
        if self._num_unfinished:
            raise EngineError(f"asleep with {self._num_unfinished} requests unfinished")
        self._cached.clear()
        self._asleep = True

    async def wake(self) -> None:
        """Serve again."""
        self._asleep = False

    async def check_health(self) -> None:
        """Return unless it was killed or closed."""
        if self._gone is not None:
            raise self._gone()

    def kill(self) -> None:
        """Lose everything at once, as ``kill -9`` of the engine's process would."""
        self._end_all(lambda: EngineLost("the clock engine was killed"))

    async def close(self) -> None:
        """Fail unfinished requests and stop."""
        self._end_all(lambda: EngineError("the clock engine is closed"))

    @property
    def _started(self) -> ClockReplica:
        if self._replica is None:
            raise EngineError("the clock engine was not started; await engine.start()")
        return self._replica

    def _serving(self) -> ClockReplica:
        if self._gone is not None:
            raise self._gone()
        if self._asleep:
            raise EngineError("the clock engine sleeps; await engine.wake()")
        return self._started

    def _begin(self, session: str, sequence: clock_replica.Sequence) -> None:
        self._running.setdefault(session, []).append(sequence)
        self._num_unfinished += 1
        self._drained.clear()

    def _finish(self, session: str, sequence: clock_replica.Sequence) -> None:
        running = self._running.get(session, [])
        running.remove(sequence)
        if not running:
            self._running.pop(session, None)
        self._num_unfinished -= 1
        if not self._num_unfinished:
            self._drained.set()

    def _end_all(self, gone: Callable[[], EngineError]) -> None:
        if self._gone is not None:
            return
        self._gone = gone
        for sequences in self._running.values():
            for sequence in sequences:
                if not sequence.done.done():
                    sequence.done.set_exception(gone())


__all__ = ["ClockEngine", "ClockSettings", "ReplicaCounts"]
