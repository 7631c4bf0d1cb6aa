"""Groups that wait in line, in a checkpoint: finished ones whole, the others by name.

::

    waiting/line.json                       places in order of dispatch
            trajectories.jsonl              everything that was played for the finished ones
            trajectories.tokens.safetensors

A resumed run trains on the finished groups, whose tokens keep their versions, and plays the others
again: their seeds derive from names. So every prompt is trained once. There are at most as many as
the buffer's budget has room for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import CheckpointError, DataError
from agentrl.rollout.buffer import Lookahead, Slot, Verdict
from agentrl.rollout.feed import TaskFeed
from agentrl.telemetry.trajectory_io import read_trajectories, write_trajectories
from agentrl.types import Trajectory, TrajectoryGroup

FOLDER = "waiting"
_LINE, _TRAJECTORIES = "line.json", "trajectories.jsonl"


def waiting_part(line: Sequence[Slot]) -> Mapping[str, WaitingGroups]:
    """Return what a checkpoint stores of a line, by the name of its folder; nothing of none."""
    return {FOLDER: WaitingGroups(line)} if line else {}


class WaitingGroups:
    """A line as it stands at a moment: what finishes afterwards is not in it."""

    def __init__(self, line: Sequence[Slot]) -> None:
        self._places = [_place(slot) for slot in line]
        self._finished = [slot.group for slot in line if slot.group is not None]

    def save(self, directory: Path) -> PendingGroups:
        """Return what writes the line into ``directory``, which exists."""
        return PendingGroups(directory, self._places, self._finished)


@dataclass(slots=True, frozen=True)
class PendingGroups:
    """A line that is yet to be written. Finished groups do not change."""

    directory: Path
    places: list[dict[str, Any]]
    finished: list[TrajectoryGroup]

    def wait(self) -> None:
        """Write every file.

        Raises:
            OSError: the disk is full or read-only.
        """
        played = [trajectory for group in self.finished for trajectory in group.recorded]
        write_trajectories(self.directory / _TRAJECTORIES, played)
        (self.directory / _LINE).write_text(json.dumps(self.places), encoding="utf-8")


def _place(slot: Slot) -> dict[str, Any]:
    assert slot.dispatch is not None, "a place was kept before its prompt was drawn"
    place = {
        "index": slot.dispatch.index,
        "task": slot.dispatch.task.id,
        "version": slot.version,
        "group": None,
    }
    if (group := slot.group) is not None:
        place["group"] = {
            "id": group.id,
            "env_id": group.env_id,
            "policy_version": group.policy_version,
            "verdict": slot.verdict,
            "members": len(group.trajectories),
            "baseline": group.baseline is not None,
            "discarded": len(group.discarded),
        }
    return place


def read_waiting(checkpoint: Path, feed: TaskFeed, rules: Lookahead, *, step: int) -> list[Slot]:
    """Return the line of a checkpoint; an empty one where nothing was waiting.

    Args:
        feed: hands the prompts out again, and hears of their groups.
        rules: of the buffer that the line goes on in.
        step: of the checkpoint.

    Raises:
        CheckpointError: the files are damaged, or the line is longer than the rules allow.
    """
    folder = checkpoint / FOLDER
    if not folder.is_dir():
        return []
    try:
        places = json.loads((folder / _LINE).read_bytes())
        played = iter(read_trajectories(folder / _TRAJECTORIES))
        line = [_slot(place, played, feed) for place in places]
    except (OSError, ValueError, KeyError, TypeError, StopIteration, DataError) as error:
        raise CheckpointError(
            f"the groups that wait in the checkpoint {str(checkpoint)!r} cannot be read "
            f"({type(error).__name__}: {error}): resume from another one, or delete this one"
        ) from error
    _refuse_late(line, rules, step=step, checkpoint=checkpoint)
    return line


def _slot(place: Mapping[str, Any], played: Iterator[Trajectory], feed: TaskFeed) -> Slot:
    slot = Slot(place["version"], feed.again(place["index"]))
    assert slot.dispatch is not None
    if (stored := place["group"]) is None:
        return slot
    task = slot.dispatch.task
    group = TrajectoryGroup(
        id=stored["id"],
        task=task,
        env_id=stored["env_id"],
        trajectories=[next(played) for _ in range(stored["members"])],
        policy_version=stored["policy_version"],
        index=slot.dispatch.index,
        baseline=next(played) if stored["baseline"] else None,
        discarded=[next(played) for _ in range(stored["discarded"])],
        gave_up=stored["verdict"] == Verdict.FAILED,
    )
    if place["task"] != task.id:  # the tasks were changed by force: this one is played
        return slot
    for trajectory in group.recorded:
        trajectory.task = task  # whole, also where JSON has no word for its data
    slot.group, slot.verdict = group, Verdict(stored["verdict"])
    return slot


def _refuse_late(line: Sequence[Slot], rules: Lookahead, *, step: int, checkpoint: Path) -> None:
    """Refuse a line in which a group would come to its turn later than it may.

    Raises:
        CheckpointError: says what was allowed when it was written.
    """
    for place, slot in enumerate(line):
        turn = step + place // rules.prompts_per_step
        if turn - slot.version > rules.max_staleness and not rules.cuts:
            raise CheckpointError(
                f"{len(line)} groups wait in the checkpoint {str(checkpoint)!r}, and group "
                f"{slot.dispatch.index if slot.dispatch else place} of them, dispatched at version "
                f"{slot.version}, would be trained at version {turn}: more than "
                f"rollout.max_staleness={rules.max_staleness} allows with "
                f"trainer.prompts_per_step={rules.prompts_per_step}; resume with the settings of "
                "the run, or start a new one"
            )
