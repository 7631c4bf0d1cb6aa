"""Request-level continuous batching: one :meth:`Scheduler.step` admits, prefills and decodes.

A request takes a row as soon as one is free, whatever the others are doing, and leaves it with
its last token. A step first prefills everything that was admitted (the tail of the prompt that
the session's row does not hold yet, in chunks over several rows), then decodes one token of every
running request. The last prompt token is always fed by the decode step, so that prefill needs no
logits. Synchronous and free of asyncio; only one thread may be inside.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from agentrl.errors import AgentRLError, EngineError
from agentrl.rollout.engines.hf_rows import DecodeRows
from agentrl.rollout.engines.hf_runner import Runner
from agentrl.rollout.engines.hf_sessions import Session, SessionTable, common_prefix
from agentrl.rollout.engines.hf_shapes import ShapePlan
from agentrl.rollout.sampling import sample
from agentrl.types import GenerateRequest, Generation, StopReason


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One request on its way."""

    request: GenerateRequest
    prompt: np.ndarray
    """int64 [T]"""
    session: Session | None = None
    aborted: bool = False
    """To be ended at the next step with what it has."""
    cancelled: bool = False
    """Nobody waits for it any more."""
    start: int = 0
    """First position that prefill still has to write."""
    num_cached: int = 0
    """Prompt tokens whose keys and values were already there."""
    donor: Session | None = None
    """Session to copy a prefix from, once it is ready."""


Outcome = Generation | AgentRLError


@dataclass(slots=True)
class SchedulerStats:
    """What was computed so far, in tokens."""

    prefilled: int = 0
    decoded: int = 0
    reused: int = 0
    """Prompt tokens whose keys and values were already there."""
    steps: int = 0


class Scheduler:
    """Rows, sessions and waiting requests over one runner.

    Args:
        runner: the model.
        plan: the shapes to compute in; None computes in whatever shape comes.
        prefill_tokens: most tokens of a prefill pass.
        table: sessions.
    """

    def __init__(
        self, runner: Runner, *, plan: ShapePlan | None, prefill_tokens: int, table: SessionTable
    ) -> None:
        self._runner, self._plan, self._table = runner, plan, table
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._rows = DecodeRows(runner.num_rows, runner.max_context)
        self.policy_version = 0
        self.stats = SchedulerStats()

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._running)

    def submit(self, job: Job) -> None:
        """Queue a request."""
        self._waiting.append(job)

    def end_session(self, session_id: str) -> None:
        """Forget a session without a running request."""
        self._table.end(session_id)

    def drop_cache(self) -> None:
        """Forget all keys and values; nothing may be unfinished."""
        assert not self.num_unfinished
        self._table.clear()

    def unfinished(self) -> list[Job]:
        """Requests that wait or run."""
        return [*self._waiting, *self._running.values()]

    def step(self) -> list[tuple[Job, Outcome]]:
        """Advance every running request by one token; return those that ended."""
        with torch.inference_mode():
            ended = self._drop_ended()
            self._prefill(self._admit())
            if self._running:
                self._compact()
                ended += self._decode()
            self.stats.steps += 1
            return ended

    # ------------------------------------------------------------------ coming and going

    def _drop_ended(self) -> list[tuple[Job, Outcome]]:
        """Take out what was cancelled or aborted since the last step."""
        ended: list[tuple[Job, Outcome]] = []
        gone = [job for job in self._waiting if job.cancelled or job.aborted]
        for job in gone:
            self._waiting.remove(job)
        for row, job in list(self._running.items()):
            if job.cancelled or job.aborted:
                ended.append((job, self._finish(row, StopReason.ABORT)))
        for job in gone:
            empty = Generation(ids=[], logprobs=[], policy_version=[], stop_reason=StopReason.ABORT)
            ended.append((job, empty))
        return ended

    def _admit(self) -> list[Job]:
        """Give rows to waiting requests, in order; later turns may pass where a row is theirs."""
        admitted: list[Job] = []
        blocked: deque[Job] = deque()
        for job in self._waiting:
            session = self._table.get(job.request.session_id)
            place = None
            if not blocked or session.row >= 0:
                place = self._table.claim(session, job.prompt)
            if place is None:
                blocked.append(job)
                continue
            job.session = session
            job.start, job.donor = place
            self._running[session.row] = job
            admitted.append(job)
        self._waiting = blocked
        return admitted

    def _finish(self, row: int, reason: StopReason | None = None) -> Generation:
        """Free a row and return what its request produced."""
        job = self._running.pop(row)
        assert job.session is not None
        self._rows.active[row] = False
        ids, logprobs, stopped = self._rows.result(row)
        # The last token was sampled but never fed: the row holds everything before it.
        tokens = np.concatenate([job.prompt, np.asarray(ids, np.int64)])[:-1]
        self._table.release(job.session, tokens)
        return Generation(
            ids=ids,
            logprobs=logprobs,
            policy_version=[self.policy_version] * len(ids),
            stop_reason=reason or (StopReason.STOP if stopped else StopReason.LENGTH),
            num_cached_tokens=job.num_cached,
        )

    # ------------------------------------------------------------------ prefill

    def _prefill(self, admitted: list[Job]) -> None:
        """Write the prompts of admitted jobs, first those that others copy from."""
        pending = admitted
        while pending:
            ready = [job for job in pending if job.donor is None or job.donor.ready]
            pending = [job for job in pending if job.donor is not None and not job.donor.ready]
            assert ready, "a donor is always admitted before who copies from it"
            for job in ready:
                self._copy_prefix(job)
            self._write_tails(ready)
            for job in ready:
                self._begin_decode(job)

    def _copy_prefix(self, job: Job) -> None:
        assert job.session is not None
        if job.donor is not None:
            job.start = common_prefix(job.donor.tokens, job.session.tokens)
            self._table.copy(job.donor, job.session, job.start)
            job.donor = None
        job.num_cached = job.start
        self.stats.reused += job.start

    def _begin_decode(self, job: Job) -> None:
        assert job.session is not None
        job.session.ready = True
        last = len(job.prompt) - 1
        sampling = job.request.sampling
        self._rows.start(job.session.row, int(job.prompt[last]), last, sampling)

    def _write_tails(self, jobs: list[Job]) -> None:
        """Prefill ``prompt[start:-1]`` of every job, longest first, so that chunks fit."""
        tails = [job for job in jobs if job.start < len(job.prompt) - 1]
        self.stats.prefilled += sum(len(job.prompt) - 1 - job.start for job in tails)
        if self._plan is not None and not self._plan.prefills:
            self._write_stepwise(tails, self._plan)
            return
        while tails:
            tails.sort(key=lambda job: len(job.prompt) - job.start, reverse=True)
            longest = len(tails[0].prompt) - 1 - tails[0].start
            num, chunk = self._prefill_shape(longest, len(tails))
            self._write_chunk(tails[:num], num, chunk)
            tails = [job for job in tails if job.start < len(job.prompt) - 1]

    def _prefill_shape(self, longest: int, waiting: int) -> tuple[int, int]:
        """Sequences and tokens of the next pass."""
        if self._plan is None:
            chunk = min(longest, self._prefill_tokens)
            return max(1, min(waiting, self._prefill_tokens // chunk)), chunk
        chunk = self._plan.chunk(longest)
        return self._plan.jobs(chunk, waiting), chunk

    def _write_chunk(self, jobs: list[Job], num: int, chunk: int) -> None:
        """Write up to ``chunk`` tokens of each job; padded to ``num`` sequences."""
        ids = np.zeros((num, chunk), np.int64)
        rows, starts, counts = (np.zeros(num, np.int64) for _ in range(3))
        for i, job in enumerate(jobs):
            assert job.session is not None
            end = min(len(job.prompt) - 1, job.start + chunk)
            ids[i, : end - job.start] = job.prompt[job.start : end]
            rows[i], starts[i], counts[i] = job.session.row, job.start, end - job.start
            job.start = end
        length, total = self._length(int((starts + counts).max())), int(counts.sum())
        if self._plan is not None:
            total = self._plan.num_tokens(total, num * chunk)
        self._runner.prefill(ids, rows, starts, counts, length, total)

    def _write_stepwise(self, jobs: list[Job], plan: ShapePlan) -> None:
        """Prefill through the one decode shape that there is."""
        size, length = plan.batches[-1], plan.lengths[-1]
        while jobs:
            ids, positions, active = np.zeros((2, size), np.int64), None, np.zeros(size, bool)
            ids, positions = ids
            for job in jobs:
                assert job.session is not None
                row = job.session.row
                ids[row], positions[row], active[row] = job.prompt[job.start], job.start, True
                job.start += 1
            self._runner.decode(ids, positions, active, length)
            jobs = [job for job in jobs if job.start < len(job.prompt) - 1]

    def _length(self, tokens: int) -> int:
        return tokens if self._plan is None else self._plan.length(tokens)

    # ------------------------------------------------------------------ decode

    def _batch(self, rows: int) -> int:
        return rows if self._plan is None else self._plan.batch(rows)

    def _compact(self) -> None:
        """Move requests into lower rows where that makes the step smaller."""
        wanted = self._batch(len(self._running))
        if self._batch(max(self._running) + 1) <= wanted:
            return
        free = (row for row in range(wanted) if row not in self._running)
        for source in sorted(row for row in self._running if row >= wanted):
            target = next(free)
            job = self._running.pop(source)
            assert job.session is not None
            # What was sampled so far must move too, not only the prompt.
            job.session.tokens = self._held_tokens(job, source)
            self._table.relocate(job.session, target)
            self._rows.move(source, target)
            self._running[target] = job

    def _held_tokens(self, job: Job, row: int) -> np.ndarray:
        sampled = self._rows.ids[row, : self._rows.num_done[row]]
        return np.concatenate([job.prompt, sampled])[: self._rows.position[row]]

    def _decode(self) -> list[tuple[Job, Outcome]]:
        """Sample one token of every running request."""
        rows = self._rows
        batch = self._batch(max(self._running) + 1)
        active = rows.active[:batch]
        length = self._length(int(rows.position[:batch][active].max()) + 1)
        logits = self._runner.decode(rows.next_id[:batch], rows.position[:batch], active, length)
        ids, logprobs = sample(logits, rows.sampling(batch))
        finished, broken = rows.record(ids.cpu().numpy(), logprobs.cpu().numpy())
        self.stats.decoded += len(self._running)
        ended: list[tuple[Job, Outcome]] = []
        for row in broken.tolist():
            job = self._running[row]
            self._finish(row)
            ended.append((job, _not_finite(job)))
        for row in finished.tolist():
            if row in self._running:
                ended.append((self._running[row], self._finish(row)))
        return ended


def _not_finite(job: Job) -> EngineError:
    return EngineError(
        f"session {job.request.session_id!r}: the model's logits are not finite; the weights have "
        "diverged, go back to a checkpoint or lower the learning rate"
    )
