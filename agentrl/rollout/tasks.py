"""The endless stream of tasks: every task once an epoch, in an order that a seed decides."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentrl.env.deadline import call_within
from agentrl.env.task_check import content_of, task_fault
from agentrl.errors import AgentRLError, DataError, EnvError
from agentrl.seeding import derive_seed
from agentrl.types import Task


@dataclass(slots=True, frozen=True, kw_only=True)
class Dispatch:
    """One prompt to sample: the ``index``-th of the run."""

    index: int
    epoch: int
    task: Task
    env: str = ""
    """Name of its environment, where there may be several."""


class TaskStream:
    """Shuffled epochs over a list of tasks. Position ``index`` alone decides what comes.

    Raises:
        DataError: no tasks, or two with one id (seeds derive from ids).
        EnvError: something in the list is no sound task.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int, source: str) -> None:
        check_tasks(tasks, source=source)
        self._tasks = tasks
        self._source = source
        self._seed = seed
        self._order: tuple[int, np.ndarray] | None = None

    def at(self, index: int) -> Dispatch:
        """Return the task at ``index`` (0-based, over all epochs)."""
        epoch, offset = divmod(index, len(self._tasks))
        if self._order is None or self._order[0] != epoch:
            rng = np.random.default_rng(derive_seed(self._seed, "epoch", epoch))
            self._order = (epoch, rng.permutation(len(self._tasks)))
        task = self._tasks[int(self._order[1][offset])]
        _refuse_faulty(task, source=self._source)  # of a long split only some were looked at
        return Dispatch(index=index, epoch=epoch, task=task)

    def starting_at(self, index: int) -> Iterator[Dispatch]:
        """Yield tasks without end, from ``index`` on."""
        while True:
            yield self.at(index)
            index += 1


MAX_CHECKED = 2_000
"""Tasks looked at in a split that is longer: generated ones are made when they are asked for."""


def read_split(env: Any, split: str, *, env_id: str, timeout_s: float = 120.0) -> Sequence[Task]:
    """Ask an environment for a split.

    Raises:
        EnvTimeout: it did not answer within ``timeout_s`` seconds.
        EnvError: it raised, or what it returned is no sequence.
        AgentRLError: as the environment says.
    """
    try:
        tasks = call_within(
            lambda: env.tasks(split),
            timeout_s,
            what=f"environment {env_id!r}: tasks({split!r})",
            fix="make it faster, or raise env.tasks_timeout_s",
        )
    except AgentRLError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvError(
            f"environment {env_id!r}: tasks({split!r}) raised {type(error).__name__}: {error}; "
            "return a sequence of Task, empty where there is no such split"
        ) from error
    _refuse_other_than_sequence(tasks, source=f"environment {env_id!r}: tasks({split!r})")
    return tasks


def _refuse_other_than_sequence(tasks: Any, *, source: str) -> None:
    indexed = hasattr(type(tasks), "__len__") and hasattr(type(tasks), "__getitem__")
    if not indexed or isinstance(tasks, str | bytes | bytearray | Mapping):
        raise EnvError(
            f"{source}: the tasks of a split must be a sequence of Task, "
            f"got {type(tasks).__name__}; return a list, empty where there are none"
        )


def _spread(tasks: Sequence[Task], *, source: str) -> list[Task]:
    """Return all tasks of a list; of anything else that is long, some that lie evenly apart.

    Raises:
        EnvError: one cannot be made, or is no sound task.
    """
    _refuse_other_than_sequence(tasks, source=source)
    try:
        size = len(tasks)
        whole = isinstance(tasks, list | tuple) or size <= MAX_CHECKED
        count = size if whole else MAX_CHECKED
        # By index: a sequence made on demand may lack the IndexError that ends an iteration.
        sample = [tasks[i * size // count] for i in range(count)]
    except (Exception, SystemExit) as error:
        raise EnvError(
            f"{source}: a task cannot be read: {type(error).__name__}: {error}; "
            "every index below the length must give a Task"
        ) from error
    for item in sample:
        _refuse_faulty(item, source=source)
    return sample


def _refuse_faulty(item: Any, *, source: str) -> None:
    fault = task_fault(item)
    if fault is not None:
        raise EnvError(f"{source}: the split holds {fault[0]}; {fault[1]}")


def check_tasks(tasks: Sequence[Task], *, source: str) -> None:
    """Refuse an empty list, items that are no sound tasks, and repeated ids.

    Raises:
        EnvError: no sequence, or one that holds something else than sound tasks.
        DataError: empty, or with the ids in question.
    """
    sample = _spread(tasks, source=source)
    if not sample:
        raise DataError(f"{source}: no tasks; check the split's name and the environment's kwargs")
    seen: set[str] = set()
    repeated = sorted({task.id for task in sample if task.id in seen or seen.add(task.id)})
    if repeated:
        raise DataError(
            f"{source}: {len(repeated)} task ids occur more than once, for example {repeated[:3]}; "
            "ids must be unique, since seeds derive from them"
        )


def check_disjoint(train: Sequence[Task], held_out: Sequence[Task], *, split: str) -> None:
    """Refuse evaluation tasks that are trained on, by id and by content.

    Contents of tasks that are made on demand are compared in short splits only.

    Raises:
        EnvError: a split holds something else than sound tasks.
        DataError: with some of the shared ids.
    """
    trained, held = _spread(train, source="train"), _spread(held_out, source=split)
    known_ids = {task.id for task in trained}
    shared = sorted(task.id for task in held if task.id in known_ids)
    if not shared and len(trained) == len(train) and len(held) == len(held_out):
        known = {_digest(task) for task in trained}
        shared = sorted(task.id for task in held if _digest(task) in known)
    if shared:
        raise DataError(
            f"{len(shared)} tasks of split {split!r} are in the train split too, by id or by data, "
            f"for example {shared[:3]}: evaluation would measure memory; make the splits disjoint"
        )


def fingerprint(tasks: Sequence[Task], *, source: str) -> str:
    """Return a hash of the tasks and their order; of long lists, of ids and some of the contents.

    Two runs with one fingerprint see the same tasks at the same positions.
    """
    sample = _spread(tasks, source=source)
    digest = hashlib.blake2b(f"{len(tasks)}".encode(), digest_size=16)
    stride = -(-len(sample) // MAX_CHECKED)
    for index, task in enumerate(sample):
        digest.update(f"\x00{task.id}".encode())
        if index % stride == 0:
            digest.update(_digest(task))
    return digest.hexdigest()


def _digest(task: Task) -> bytes:
    """Hash the content of a task, without where it stood in which file (verl's ``extra_info``)."""
    data = {name: value for name, value in task.data.items() if name != "extra_info"}
    content = content_of(Task(id=task.id, data=data or task.data))
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).digest()
