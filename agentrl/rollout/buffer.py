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
from enum import StrEnum

from agentrl.errors import TrainingError
from agentrl.types import TrajectoryGroup


class Verdict(StrEnum):
    """What a finished group is good for."""

    TRAINABLE = "trainable"
    FAILED = "failed"
    """The failure policy gave it up: never trained, always replaced."""
    NO_SIGNAL = "no_signal"
    """Every advantage would be 0: replaced as far as the step's refills go."""


@dataclass(slots=True, eq=False)
class Slot:
    """A place in the queue, taken at dispatch and filled when the group is done."""

    group: TrajectoryGroup | None = None
    verdict: Verdict | None = None
    """None until the group is done."""


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
        """Groups whose place was given to another one, since the start."""

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

    async def fill(self, slot: Slot, group: TrajectoryGroup, *, verdict: Verdict) -> None:
        """Deliver the group of a slot; :meth:`take` decides by the verdict whether it counts."""
        async with self._changed:
            slot.group, slot.verdict = group, verdict
            self._changed.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Make every present and future :meth:`take` raise ``error``: the producer has died."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def take(
        self, num_groups: int, *, timeout_s: float, max_rejected: int, max_refills: int = 0
    ) -> list[TrajectoryGroup]:
        """Return the oldest groups: ``num_groups`` that count, and those that others replaced.

        A group that does not count gives its place back, so that the producer dispatches another
        one. It is returned too (failed rollouts are data).

        Args:
            max_rejected: groups that may have failed before this is given up.
            max_refills: groups without signal that are replaced; further ones count.

        Raises:
            TrainingError: the deadline passed, or more than ``max_rejected`` groups failed: it
                would go on like that for ever. Says what was there.
        """
        taken: list[TrajectoryGroup] = []
        missing, refills = num_groups, 0
        try:
            async with asyncio.timeout(timeout_s):
                while missing:
                    slot = await self._next_done(replace_flat=refills < max_refills)
                    assert slot.group is not None
                    taken.append(slot.group)
                    if slot.verdict is Verdict.NO_SIGNAL and refills < max_refills:
                        refills += 1
                    elif slot.verdict is not Verdict.FAILED:
                        missing -= 1
                    num_failed = len(taken) - refills - (num_groups - missing)
                    if num_failed > max_rejected:
                        raise TrainingError(
                            f"{num_failed} groups in one step could not be trained "
                            f"on; {failure_causes(taken)}. Look at the errors with `agentrl envs "
                            "check`, or choose another failure.policy"
                        )
        except TimeoutError as error:
            num_failed = len(taken) - refills - (num_groups - missing)
            raise TrainingError(
                f"only {num_groups - missing} of {num_groups} groups were ready after "
                f"{timeout_s} s ({self.num_waiting} dispatched and unfinished)"
                f"{_replaced(refills, num_failed)}; "
                f"{_late_advice(refills, num_failed, missing)}"
            ) from error
        return taken

    async def _next_done(self, *, replace_flat: bool) -> Slot:
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    self._failure is not None
                    or (bool(self._slots) and self._slots[0].verdict is not None)
                )
            )
            if self._failure is not None:
                raise self._failure
            slot = self._slots.popleft()
            flat = slot.verdict is Verdict.NO_SIGNAL and replace_flat
            if flat or slot.verdict is Verdict.FAILED:
                self.num_rejected += 1
                self._dispatched -= 1  # else a synchronous run would wait for it for ever
                self._changed.notify_all()
            return slot

    async def advance(self, *, version: int) -> None:
        """Say that ``version`` is sampled from now on: frees budget, wakes the producer."""
        async with self._changed:
            self._version = version
            self._changed.notify_all()


def _replaced(refills: int, num_failed: int) -> str:
    """Say which groups were ready and did not count."""
    parts = []
    if refills:
        parts.append(f"{refills} more were ready, had no signal and were replaced")
    if num_failed:
        parts.append(f"{num_failed} more failed and were replaced")
    return "".join(f"; {part}" for part in parts)


def _late_advice(refills: int, num_failed: int, missing: int) -> str:
    """Say what to change: time is not what lacks where what was ready would have been enough."""
    if refills and refills >= max(missing, num_failed):
        return (
            "lower algo.groups.max_refills, which bounds how many groups whose samples all earn "
            "the same are replaced in a step, or give tasks that are solved sometimes: easier ones "
            "where none is solved, harder ones where all are"
        )
    if num_failed >= missing:
        return (
            "look at the errors with `agentrl envs check`, or choose another failure.policy; raise "
            "rollout.collect_timeout_s where the failures are meant"
        )
    return (
        "raise rollout.collect_timeout_s, or lower rollout.trajectory_timeout_s so that slow "
        "episodes end earlier"
    )


def failure_causes(groups: Sequence[TrajectoryGroup]) -> str:
    """Say why trajectories failed: counts by stop reason, and one error in full."""
    failed = [
        trajectory
        for group in groups
        for trajectory in (*group.trajectories, group.baseline)
        if trajectory is not None and trajectory.failed
    ]
    counts = Counter(str(trajectory.stop_reason) for trajectory in failed)
    if not failed:
        return "no trajectory failed"
    causes = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return f"{len(failed)} trajectories failed: {causes}; the first with {failed[0].error}"
