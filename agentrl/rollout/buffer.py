"""The bounded queue between rollout and training.

Groups leave in the order in which they were dispatched, so the bound on staleness is exact: when
``version`` is being sampled, at most ``(max_staleness + version + 1) * prompts_per_step`` groups
have been dispatched, of which ``version * prompts_per_step`` were trained. A group is therefore
trained at most ``max_staleness`` versions after it was dispatched.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.errors import TrainingError
from agentrl.types import TrajectoryGroup


@dataclass(slots=True, eq=False)
class Slot:
    """A place in the queue, taken at dispatch and filled when the group is done."""

    group: TrajectoryGroup | None = None
    trainable: bool = True
    done: bool = False


class RolloutBuffer:
    """Bounded FIFO of prompt groups in dispatch order.

    Args:
        prompts_per_step: groups that one training step takes.
        max_staleness: versions a group may lag behind the step that trains it.
        version: version sampled at the start (of a resumed run: its step).
    """

    def __init__(self, *, prompts_per_step: int, max_staleness: int, version: int = 0) -> None:
        self._prompts_per_step = prompts_per_step
        self._max_staleness = max_staleness
        self._version = version
        self._dispatched = version * prompts_per_step
        self._slots: deque[Slot] = deque()
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None
        self.num_rejected = 0
        """Groups that came back untrainable and were refilled, since the start."""

    @property
    def budget(self) -> int:
        """Groups that may have been dispatched by now."""
        return (self._max_staleness + self._version + 1) * self._prompts_per_step

    @property
    def num_waiting(self) -> int:
        """Groups dispatched and not yet taken."""
        return len(self._slots)

    async def reserve(self) -> Slot:
        """Wait for room in the budget and take the next place in line."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._dispatched < self.budget)
            self._dispatched += 1
            slot = Slot()
            self._slots.append(slot)
            self._changed.notify_all()
            return slot

    async def fill(self, slot: Slot, group: TrajectoryGroup, *, trainable: bool) -> None:
        """Deliver the group of a slot. An untrainable one is refilled by :meth:`take`."""
        async with self._changed:
            slot.group, slot.trainable, slot.done = group, trainable, True
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Make every present and future :meth:`take` raise ``error``: the producer has died."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def take(
        self, num_groups: int, *, timeout_s: float, max_rejected: int
    ) -> list[TrajectoryGroup]:
        """Return the oldest groups, untrainable ones included beside ``num_groups`` trainable.

        An untrainable group gives its place back, so that the producer dispatches another one.
        It is returned too (failed rollouts are data).

        Raises:
            TrainingError: the deadline passed, or more than ``max_rejected`` groups were
                untrainable: it would go on like that for ever. Says what was there.
        """
        taken: list[TrajectoryGroup] = []
        num_trainable = 0
        try:
            async with asyncio.timeout(timeout_s):
                while num_trainable < num_groups:
                    slot = await self._next_done()
                    assert slot.group is not None
                    taken.append(slot.group)
                    num_trainable += slot.trainable
                    if len(taken) - num_trainable > max_rejected:
                        raise TrainingError(
                            f"{len(taken) - num_trainable} groups in one step could not be trained "
                            f"on; {failure_causes(taken)}. Look at the errors with `agentrl envs "
                            "check`, or choose another failure.policy"
                        )
        except TimeoutError as error:
            raise TrainingError(
                f"only {num_trainable} of {num_groups} groups were ready after {timeout_s} s "
                f"({self.num_waiting} dispatched and unfinished); raise rollout.collect_timeout_s, "
                "or lower rollout.trajectory_timeout_s so that slow episodes end earlier"
            ) from error
        return taken

    async def _next_done(self) -> Slot:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._failure is not None or (bool(self._slots) and self._slots[0].done)
            )
            if self._failure is not None:
                raise self._failure
            slot = self._slots.popleft()
            if not slot.trainable:
                self.num_rejected += 1
                self._dispatched -= 1  # else a synchronous run would wait for it for ever
                self._changed.notify_all()
            return slot

    async def advance(self, *, version: int) -> None:
        """Say that ``version`` is sampled from now on: frees budget, wakes the producer."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()


def failure_causes(groups: Sequence[TrajectoryGroup]) -> str:
    """Say why trajectories failed: counts by stop reason, and one error in full."""
    failed = [t for group in groups for t in group.trajectories if t.failed]
    counts = Counter(str(trajectory.stop_reason) for trajectory in failed)
    if not failed:
        return "no trajectory failed"
    causes = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return f"{len(failed)} trajectories failed: {causes}; the first with {failed[0].error}"
