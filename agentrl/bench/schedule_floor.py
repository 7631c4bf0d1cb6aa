"""The least time in which any schedule could do the work of a run on the token clock.

``optimum = max(work / capacity, longest trajectory, updates)``:

* work: seconds of a device that all tokens take at least. Every decoded token reads its own keys
  and values, and its share of the weights in a batch as large as there are slots; or it is bound by
  compute, prefill included, whichever is more. Each prompt is read once.
* longest trajectory: alone on a device, with the latencies of its tools.
* updates: the optimizer's steps, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agentrl.testing.token_clock import ClockSettings
from agentrl.types import Trajectory

LatencyOf = Callable[[int, int], float]
"""(Seed of an episode, turn) -> seconds of its tools."""


@dataclass(slots=True)
class WorkDone:
    """What trajectories cost at least; add them up with :meth:`add`."""

    settings: ClockSettings
    latency_s: LatencyOf
    sampled_tokens: int = 0
    num_trajectories: int = 0
    memory_s: float = 0.0
    compute_s: float = 0.0
    longest_s: float = 0.0

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Add trajectories of one segment each."""
        for trajectory in trajectories:
            self.num_trajectories += 1
            self.longest_s = max(self.longest_s, self._add(trajectory))

    def _add(self, trajectory: Trajectory) -> float:
        cost, scale = self.settings.cost, self.settings.tokens_per_id
        read, alone_s = 0, 0.0
        for turn in trajectory.turns:
            before, decoded = turn.start * scale, (turn.end - turn.start) * scale
            prefill_s = cost.prefill_s(before - read, read)
            memory_s, compute_s = cost.work(decoded, before, batch=self.settings.num_slots)
            self.memory_s += memory_s
            self.compute_s += compute_s + prefill_s
            self.sampled_tokens += decoded
            alone_s += prefill_s + cost.steps_s(decoded, 1, before)
            alone_s += self.latency_s(trajectory.seed, turn.index)
            read = before + decoded
        return alone_s

    def optimum_s(self, *, num_replicas: int, updates_s: Sequence[float] = ()) -> float:
        """Return the seconds below which no schedule can come."""
        work_s = max(self.memory_s, self.compute_s) / num_replicas
        return max(work_s, self.longest_s, sum(updates_s))
