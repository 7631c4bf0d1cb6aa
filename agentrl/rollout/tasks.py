"""The endless stream of tasks: every task once an epoch, in an order that a seed decides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.errors import DataError
from agentrl.seeding import derive_seed
from agentrl.types import Task


@dataclass(slots=True, frozen=True, kw_only=True)
class Dispatch:
    """One prompt to sample: the ``index``-th of the run."""

    index: int
    epoch: int
    task: Task


class TaskStream:
    """Shuffled epochs over a list of tasks. Position ``index`` alone decides what comes.

    Raises:
        DataError: no tasks, or two with one id (seeds derive from ids).
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, source: str) -> None:
        check_tasks(tasks, source=source)
        self._tasks = tasks
        self._seed = seed
        self._order: tuple[int, np.ndarray] | None = None

    def at(self, index: int) -> Dispatch:
        """Return the task at ``index`` (0-based, over all epochs)."""
        epoch, offset = divmod(index, len(self._tasks))
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng(derive_seed(self._seed, "epoch", epoch))
            self._order = (epoch, rng.permutation(len(self._tasks)))
        return Dispatch(index=index, epoch=epoch, task=self._tasks[int(self._order[1][offset])])

    def starting_at(self, index: int) -> Iterator[Dispatch]:
        """Yield tasks without end, from ``index`` on."""
        while True:
            yield self.at(index)
            index += 1


MAX_CHECKED = 2_000
"""Tasks looked at in a split that is longer: generated ones are made when they are asked for."""


def _spread(tasks: Sequence[Task]) -> list[Task]:
    """Return all tasks of a list; of anything else that is long, some that lie evenly apart."""
    if isinstance(tasks, list | tuple) or len(tasks) <= MAX_CHECKED:
        return list(tasks)
    return [tasks[i * len(tasks) // MAX_CHECKED] for i in range(MAX_CHECKED)]


def check_tasks(tasks: Sequence[Task], *, source: str) -> None:
    """Refuse an empty list and repeated ids.

    Raises:
        DataError: with the ids in question.
    """
    if not tasks:
        raise DataError(f"{source}: no tasks; check the split's name and the environment's kwargs")
    seen: set[str] = set()
    repeated = sorted({task.id for task in _spread(tasks) if task.id in seen or seen.add(task.id)})
    if repeated:
        raise DataError(
            f"{source}: {len(repeated)} task ids occur more than once, for example {repeated[:3]}; "
            "ids must be unique, since seeds derive from them"
        )


def check_disjoint(train: Sequence[Task], held_out: Sequence[Task], *, split: str) -> None:
    """Refuse evaluation tasks that are trained on.

    Raises:
        DataError: with some of the shared ids.
    """
    shared = sorted({task.id for task in _spread(train)} & {task.id for task in _spread(held_out)})
    if shared:
        raise DataError(
            f"{len(shared)} tasks of split {split!r} are in the train split too, for example "
            f"{shared[:3]}: evaluation would measure memory; make the splits disjoint"
        )
