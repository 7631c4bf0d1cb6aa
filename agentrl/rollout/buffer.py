"""The bounded line between rollout and training.

Groups stand in line in the order in which they were dispatched. Two rules make the bound on
staleness exact, whatever finishes when:

* **Dispatch.** While version ``v`` is sampled, at most ``(v + 1) * prompts_per_step + ahead``
  groups have been trained or stand in line; ``ahead`` is at most ``max_staleness *
  prompts_per_step``. A group that is taken in its turn is therefore trained at most
  ``max_staleness`` versions after it was dispatched, and no token of it is older than its dispatch.
* **Overtaking.** A finished group may leave before up to ``window`` unfinished ones, if each of
  those, delayed by one place, still comes to its turn in time. Else the step waits for the first.

Where stragglers are cut there may be more groups than that: those whose time has passed leave the
line untrained, at most ``ahead`` of them a step.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from agentrl.errors import TrainingError
from agentrl.rollout.tasks import Dispatch
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
    """A place in the line, taken at dispatch and filled when the group is done."""

    version: int
    """Version that was being sampled at dispatch: none of its tokens is older."""
    dispatch: Dispatch | None = None
    """What is played; None for the moment between reserving and drawing it."""
    group: TrajectoryGroup | None = None
    verdict: Verdict | None = None
    """None until the group is done."""
    number: int = -1
    """In the order of dispatch, which its buffer counts."""
    cut: bool = False
    """Its time has passed: it has left the line, and what comes of it is for the record only."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Lookahead:
    """How far sampling may run ahead of training, and what it does about slow groups."""

    prompts_per_step: int
    """Groups that one training step takes."""
    max_staleness: int = 0
    """Versions a group may lag behind the step that trains it."""
    num_ahead: int | None = None
    """Groups beyond those of the present step; None: as many as ``max_staleness`` allows."""
    window: int = 0
    """Unfinished groups that a finished one may overtake; 0: strictly in order."""
    cuts: bool = False
    """Give up a group whose time has passed in place of waiting for it."""
    total_steps: int | None = None
    """Nothing is sampled for steps after these; None: there is no end."""

    @property
    def ahead(self) -> int:
        """Groups beyond those of the present step."""
        most = self.max_staleness * self.prompts_per_step
        return most if self.num_ahead is None else self.num_ahead

    def budget(self, version: int) -> int:
        """Groups that may have been trained or stand in line while ``version`` is sampled."""
        wanted = (version + 1) * self.prompts_per_step + self.ahead
        if self.total_steps is None:
            return wanted
        surplus = self.ahead if self.cuts else 0
        return min(wanted, self.total_steps * self.prompts_per_step + surplus)


class RolloutBuffer:
    """Bounded line of prompt groups in dispatch order.

    Args:
        rules: how far sampling may run ahead.
        version: version sampled at the start (of a resumed run: its step).
        line: places of a resumed run, in order of dispatch; the finished ones wait to be taken.
            Those whose time has passed are cut, as they would have been in the run itself.
    """

    def __init__(self, rules: Lookahead, *, version: int = 0, line: Sequence[Slot] = ()) -> None:
        self._rules = rules
        self._version = version
        self._num_trained = version * rules.prompts_per_step
        self._line: OrderedDict[int, Slot] = OrderedDict()
        """Number of dispatch -> place: left from anywhere, and looked at from the front, at no cost
        that grows with it."""
        self._finished: list[int] = []
        """Heap of the numbers in line that are finished; those that have left are still in it."""
        self._num_dispatched = 0
        self._expired: deque[Slot] = deque()
        """Cut, and nobody has been told yet."""
        self._given_up: list[TrajectoryGroup] = []
        """Cut, and what there is of them has come."""
        self._changed = asyncio.Condition()
        self._failure: BaseException | None = None
        self.num_rejected = 0
        """Groups whose place was given to another one, since the start."""
        for slot in line:
            self._enter(slot)
        self._cut_late()

    @property
    def num_waiting(self) -> int:
        """Groups dispatched and not yet taken."""
        return len(self._line)

    @property
    def line(self) -> list[Slot]:
        """Places in order of dispatch: what a checkpoint keeps."""
        return list(self._line.values())

    # ------------------------------------------------------------------ the producer's side

    async def reserve(self) -> Slot:
        """Wait for room in the budget and take the next place in line."""
        async with self._changed:
            await self._changed.wait_for(self._has_room)
            slot = self._enter(Slot(self._version))
            self._changed.notify_all()
            return slot

    def _enter(self, slot: Slot) -> Slot:
        """Put a place at the end of the line."""
        slot.number = self._num_dispatched
        self._num_dispatched += 1
        self._line[slot.number] = slot
        if slot.verdict is not None:
            heapq.heappush(self._finished, slot.number)
        return slot

    def _has_room(self) -> bool:
        return self._num_trained + len(self._line) < self._rules.budget(self._version)

    async def fill(self, slot: Slot, group: TrajectoryGroup, *, verdict: Verdict) -> None:
        """Deliver the group of a slot; :meth:`take` decides by the verdict whether it counts."""
        async with self._changed:
            slot.group, slot.verdict = group, verdict
            if slot.cut:
                self._give_up(group)
            else:
                heapq.heappush(self._finished, slot.number)
            self._changed.notify_all()

    async def next_cut(self) -> Slot:
        """Return the next group that nobody waits for; :meth:`fill` takes what there is of it."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._expired))
            return self._expired.popleft()

    async def fail(self, error: BaseException) -> None:
        """Make every present and future :meth:`take` raise ``error``: the producer has died."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    # ------------------------------------------------------------------ the trainer's side

    async def take(
        self, num_groups: int, *, timeout_s: float, max_rejected: int, max_refills: int = 0
    ) -> list[TrajectoryGroup]:
        """Return the next groups: ``num_groups`` that count, and those that do not, oldest first.

        A group that does not count gives its place back, so that the producer dispatches another
        one. It is returned too (failed rollouts are data), and so are groups that were cut before.

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
        given_up, self._given_up = self._given_up, []
        return sorted([*taken, *given_up], key=lambda group: group.index)

    async def _next_done(self, *, replace_flat: bool) -> Slot:
        async with self._changed:
            await self._changed.wait_for(lambda: self._failure is not None or self._ready())
            if self._failure is not None:
                raise self._failure
            slot = self._ready()
            assert slot is not None
            assert self._version - slot.version <= self._rules.max_staleness, "older than the bound"
            del self._line[slot.number]
            flat = slot.verdict is Verdict.NO_SIGNAL and replace_flat
            if flat or slot.verdict is Verdict.FAILED:
                self.num_rejected += 1
            else:
                self._num_trained += 1
            self._changed.notify_all()  # a rejected one has left room for another
            return slot

    def _ready(self) -> Slot | None:
        """Return the first finished group that may leave now; None where one must be waited for."""
        while self._finished and self._finished[0] not in self._line:
            heapq.heappop(self._finished)
        if not self._finished:
            return None
        first = self._finished[0]
        if not self._rules.cuts:
            for place, (number, slot) in enumerate(self._line.items()):
                if number == first:
                    break
                if not self._may_be_overtaken(slot, place):
                    return None
        return self._line[first]

    def _may_be_overtaken(self, slot: Slot, place: int) -> bool:
        """Whether the group at ``place`` in line, if delayed by one place, is in time."""
        turn = (self._num_trained + 1 + place) // self._rules.prompts_per_step
        in_time = turn - slot.version <= self._rules.max_staleness
        return place < self._rules.window and in_time

    async def advance(self, *, version: int) -> None:
        """Say that ``version`` is sampled from now on: frees budget, wakes the producer.

        Groups that could not be trained by then any more are cut.
        """
        async with self._changed:
            self._version = version
            self._cut_late()
            self._changed.notify_all()

    def _cut_late(self) -> None:
        """Take out of the line what could not be trained in time any more."""
        oldest = self._version - self._rules.max_staleness
        for slot in [slot for slot in self._line.values() if slot.version < oldest]:
            assert self._rules.cuts, "a group has not come to its turn in time"
            del self._line[slot.number]
            slot.cut = True
            if slot.group is None:
                self._expired.append(slot)
            else:
                self._give_up(slot.group)

    def _give_up(self, group: TrajectoryGroup) -> None:
        group.cut = group.gave_up = True
        self._given_up.append(group)


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
