"""An engine whose every token can be foretold, with the ways in which engines fail, on command."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import EngineError, EngineLost
from agentrl.types import GenerateRequest, Generation, StopReason
from agentrl.weights.served import ServedWeights, WeightSpec

FIRST_ID = 1000
"""Id of token 0 of every turn; token ``i`` has the id ``FIRST_ID + i``."""
STOP_ID = 7


def turn_length(seed: int) -> int:
    """Return how many tokens a turn has, its stop token included, if nothing cuts it: 1 to 12."""
    return 1 + seed % 12


def expected_ids(request: GenerateRequest) -> list[int]:
    """Return what a turn says, whatever engines it took."""
    sampling, length = request.sampling, turn_length(request.sampling.seed)
    ids = [FIRST_ID + index for index in range(length)]
    if STOP_ID in sampling.stop_token_ids:
        ids[-1] = STOP_ID
        return ids[: sampling.max_tokens]
    return [FIRST_ID + index for index in range(sampling.max_tokens)]


@dataclass(slots=True, eq=False)
class _Job:
    request: GenerateRequest
    done: asyncio.Future[Generation]
    cached: int
    ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ticks_left: int = -1
    """Of an abort or a cancellation that takes its time; -1 for none."""


class FakeReplica:
    """A :class:`~agentrl.rollout.engine.RolloutEngine` that says token ``FIRST_ID + i`` as token i.

    Nothing happens by itself: :meth:`tick` gives every running request one token. With ``STOP_ID``
    among the stop tokens a turn ends after :func:`turn_length` tokens, so that the whole result of
    a request is :func:`expected_ids`. A request that continues a turn must bring the tokens so far
    at the end of its prompt.

    Args:
        number: of the replica.
        version: of the weights it starts with; below 0 it has none.
        streams: whether tokens arrive one by one, so that a loss keeps them.
        abort_ticks: after which an abort, or a cancellation, takes effect: until then the request
            is unfinished.

    Attributes:
        served: every request that was given to it.
        ended: sessions that were ended.
        faults: what was done to it: witnesses that a test did what it says.
    """

    def __init__(
        self, number: int = 0, *, version: int = 0, streams: bool = False, abort_ticks: int = 0
    ) -> None:
        self.number = number
        self.policy_version = version
        self.served: list[GenerateRequest] = []
        self.ended: list[str] = []
        self.faults: list[str] = []
        self.started = self.closed = self.asleep = False
        self.start_error: Exception | None = None
        self.update_error: Exception | None = None
        self._streams = streams
        self._abort_ticks = abort_ticks
        self._jobs: list[_Job] = []
        self._emptied = asyncio.Event()
        self._known: dict[str, Sequence[int]] = {}
        self._dead = False
        self._sums: dict[str, int] = {}

    # ------------------------------------------------------------------ what a test does to it

    @property
    def num_unfinished(self) -> int:
        """Requests that it works at, told to end or not."""
        return len(self._jobs)

    def tick(self, count: int = 1) -> None:
        """Give every running request ``count`` tokens, or what is left of it."""
        for _ in range(count):
            for job in list(self._jobs):
                self._step(job)

    def kill(self, *, silently: bool = False) -> None:
        """Die with everything that is running; silently, nobody who waits is told."""
        self._dead = True
        self.faults.append(f"killed with {len(self._jobs)} running")
        for job in self._jobs:
            if not silently and not job.done.done():
                job.done.set_exception(self._lost(job))
        self._jobs.clear()
        self._emptied.set()

    def _step(self, job: _Job) -> None:
        if job.ticks_left == 0:
            self._finish(job, StopReason.ABORT)
            return
        job.ticks_left -= job.ticks_left > 0
        sampling = job.request.sampling
        index = sampling.first_index + len(job.ids)
        stops = STOP_ID in sampling.stop_token_ids
        is_last = stops and index == turn_length(sampling.seed) - 1
        job.ids.append(STOP_ID if is_last else FIRST_ID + index)
        job.versions.append(self.policy_version)
        if is_last:
            self._finish(job, StopReason.STOP)
        elif len(job.ids) == sampling.max_tokens:
            self._finish(job, StopReason.LENGTH)

    def _finish(self, job: _Job, reason: StopReason) -> None:
        self._jobs.remove(job)
        if not self._jobs:
            self._emptied.set()
        if not job.done.done():
            job.done.set_result(self._generation(job, reason))
            self._known[job.request.session_id] = [*job.request.prompt_ids, *job.ids]

    def _generation(self, job: _Job, reason: StopReason) -> Generation:
        return Generation(
            ids=list(job.ids),
            logprobs=[-float(token) for token in job.ids],
            policy_version=list(job.versions),
            stop_reason=reason,
            num_cached_tokens=job.cached,
        )

    def _lost(self, job: _Job | None = None) -> EngineLost:
        error = EngineLost(f"fake replica {self.number} was killed")
        if job is not None and self._streams:
            error.partial = self._generation(job, StopReason.ABORT)
        return error

    def _alive(self) -> None:
        if self._dead:
            raise self._lost()
        if self.closed or not self.started:
            raise EngineError(f"fake replica {self.number} is not running")

    # ------------------------------------------------------------------ RolloutEngine

    async def start(self) -> None:
        """Start, or fail as the test says."""
        if self.start_error is not None:
            raise self.start_error
        self.started = True

    async def generate(self, request: GenerateRequest) -> Generation:
        """Say a turn, token by token, as :meth:`tick` goes."""
        self._alive()
        assert not self.asleep and self.policy_version >= 0, "asked without weights"
        first = request.sampling.first_index
        so_far = [FIRST_ID + index for index in range(first)]
        assert list(request.prompt_ids)[len(request.prompt_ids) - first :] == so_far, (
            f"a turn goes on at token {first} after {list(request.prompt_ids)}"
        )
        job = _Job(request, asyncio.get_running_loop().create_future(), self._cached(request))
        self.served.append(request)
        self._jobs.append(job)
        try:
            return await job.done
        except asyncio.CancelledError:
            if job in self._jobs:
                self._end(job)
            raise

    def _cached(self, request: GenerateRequest) -> int:
        known, prompt = self._known.get(request.session_id, ()), request.prompt_ids
        pairs = enumerate(zip(known, prompt, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(known), len(prompt)))
        return min(same, len(prompt) - 1)

    def _end(self, job: _Job) -> None:
        if self._abort_ticks:
            job.ticks_left = self._abort_ticks
        else:
            self._finish(job, StopReason.ABORT)

    async def end_session(self, session_id: str) -> None:
        """Forget a session."""
        self._alive()
        self.ended.append(session_id)
        self._known.pop(session_id, None)

    async def abort(self, session_id: str | None = None) -> int:
        """End requests, after ``abort_ticks``."""
        self._alive()
        jobs = [job for job in self._jobs if session_id in (None, job.request.session_id)]
        for job in jobs:
            if job.ticks_left < 0:
                self._end(job)
        return len(jobs)

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return one tensor."""
        return [WeightSpec(name="weight", shape=(4,), dtype="float32")]

    async def update_weights(
        self, params: Iterable[tuple[str, Any]], version: int
    ) -> ServedWeights:
        """Take over weights, once what was told to end has ended; nothing else may be running."""
        self._alive()
        running = [job for job in self._jobs if job.ticks_left < 0]
        assert not running, f"weights changed under {len(running)} requests"
        from agentrl.weights.checksum import checksums

        await asyncio.sleep(0)
        while self._jobs:
            self._emptied.clear()
            await self._emptied.wait()
        self._alive()
        if self.update_error is not None:
            raise self.update_error
        self._sums = checksums(params)
        self._known.clear()
        self.policy_version = version
        return ServedWeights(version=version, sums=self._sums)

    async def sleep(self, level: int = 1) -> None:
        """Sleep; nothing may be unfinished."""
        self._alive()
        assert not self._jobs, f"put to sleep under {len(self._jobs)} requests"
        self.asleep = True

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self._alive()
        self.asleep = False

    async def check_health(self) -> None:
        """Tell whether it was killed."""
        if self._dead:
            raise self._lost()

    async def close(self) -> None:
        """Fail what is running."""
        self.closed = True
        for job in self._jobs:
            if not job.done.done():
                job.done.set_exception(EngineError("the engine was closed"))
        self._jobs.clear()
        self._emptied.set()
