"""The batch of one engine replica on the token clock: who decodes, until when.

All sequences of a batch advance by a token per step, so the state is one step counter, the number
of sequences and the sum of their contexts. Those change only when a sequence comes or goes, and
between such events the time of any number of steps has a closed form: an event costs a heap
operation, whatever the number of tokens.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from dataclasses import dataclass, field

from agentrl.testing.decode_time import EngineCost


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. Tokens are those of the clock."""

    num_prompt: int
    num_cached: int
    num_tokens: int
    """To decode."""
    done: asyncio.Future[int]
    """Resolved with the number of tokens that were decoded."""
    first_step: int = -1
    """Steps that the replica had made when this one joined; -1 while it waits."""
    ended: bool = False


@dataclass(slots=True)
class ReplicaCounts:
    """What a replica has done."""

    busy_s: float = 0.0
    """Virtual seconds in which it had something to decode or to read."""
    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    events: int = 0
    """Times that the batch was looked at: what the simulation itself costs."""


@dataclass(slots=True, eq=False)
class ClockReplica:
    """Decodes up to ``num_slots`` sequences at once; the others wait, first come, first served.

    A sequence joins at the next step boundary. Its prompt is read there, and the batch waits for
    it; what was cached is not read again.
    """

    cost: EngineCost
    num_slots: int
    loop: asyncio.AbstractEventLoop
    counts: ReplicaCounts = field(default_factory=ReplicaCounts)
    _boundary: float = 0.0
    """When the next step begins: now, or ahead of it while a step or a prompt is on its way."""
    _step: int = 0
    """Steps made by then."""
    _batch: int = 0
    _context: float = 0.0
    """Tokens held by the batch at the boundary."""
    _ends: list[tuple[int, int, Sequence]] = field(default_factory=list)
    """Heap of (last step, number, sequence); entries of sequences that ended are skipped."""
    _waiting: deque[Sequence] = field(default_factory=deque)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _timer: asyncio.TimerHandle | None = None

    def submit(self, sequence: Sequence) -> None:
        """Take a request; its future tells when it is done."""
        self._advance()
        if self._batch < self.num_slots:
            self._join(sequence)
        else:
            self._waiting.append(sequence)
        self._arm()

    def end(self, sequence: Sequence) -> None:
        """Stop a request after the step in progress; it keeps what it has by then."""
        self._advance()
        if sequence.ended:
            return
        if sequence.first_step < 0:
            self._waiting.remove(sequence)
            sequence.ended = True
            self._deliver(sequence, 0)
        else:
            num_tokens = max(self._step - sequence.first_step, 0)
            self._leave(sequence, num_tokens)
            self._refill()
        self._arm()

    def _advance(self) -> None:
        """Make the steps that have begun by now; deliver what they end."""
        now = self.loop.time()
        self.counts.events += 1
        while self._batch and self._boundary < now:
            last = self._next_end()
            steps = self.cost.steps_until(
                now - self._boundary, self._batch, self._context, most=last - self._step
            )
            seconds = self.cost.steps_s(steps, self._batch, self._context)
            self._boundary += seconds
            self._step += steps
            self._context += steps * self._batch
            self.counts.busy_s += seconds
            while self._batch and self._next_end() <= self._step:
                _, _, sequence = heapq.heappop(self._ends)
                self._leave(sequence, sequence.num_tokens)
            self._refill()
        if not self._batch:
            self._boundary = max(self._boundary, now)

    def _join(self, sequence: Sequence) -> None:
        new = sequence.num_prompt - sequence.num_cached
        seconds = self.cost.prefill_s(new, sequence.num_cached)
        self._boundary += seconds
        self.counts.busy_s += seconds
        self.counts.prefilled_tokens += new
        self.counts.cached_tokens += sequence.num_cached
        self._batch += 1
        self._context += sequence.num_prompt
        sequence.first_step = self._step
        heapq.heappush(
            self._ends, (self._step + sequence.num_tokens, next(self._numbers), sequence)
        )

    def _leave(self, sequence: Sequence, num_tokens: int) -> None:
        self._batch -= 1
        self._context -= sequence.num_prompt + (self._step - sequence.first_step)
        sequence.ended = True
        self.counts.decoded_tokens += num_tokens
        self._deliver(sequence, num_tokens)

    def _refill(self) -> None:
        while self._waiting and self._batch < self.num_slots:
            self._join(self._waiting.popleft())

    def _deliver(self, sequence: Sequence, num_tokens: int) -> None:
        if self._boundary > self.loop.time():
            self.loop.call_at(self._boundary, _resolve, sequence.done, num_tokens)
        else:
            _resolve(sequence.done, num_tokens)

    def _next_end(self) -> int:
        while self._ends[0][2].ended:
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _arm(self) -> None:
        """See that the next end is noticed. Others may have delayed it: then it is looked at again.

        A timer that is too early is left alone, since most are by the time they fire.
        """
        if not self._batch:
            return
        steps = self._next_end() - self._step
        due = self._boundary + self.cost.steps_s(steps, self._batch, self._context)
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(due, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._advance()
        self._arm()


def _resolve(done: asyncio.Future[int], num_tokens: int) -> None:
    if not done.done():
        done.set_result(num_tokens)
