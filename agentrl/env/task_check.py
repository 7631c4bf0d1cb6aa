"""Checks of an environment's tasks: there are some, they are distinct, and they can be stored."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.env.findings import Finding, error, warning
from agentrl.types import Task

SPLITS = ("train", "val", "test")
MAX_ID_CHARS = 500
MAX_TASKS = 2048
"""Tasks looked at per split, spread evenly over it: a split may be made on demand and vast."""


def check_tasks(env: Any, *, on_split: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Check the tasks of every split of ``env``.

    Args:
        on_split: told of every split before it is asked for.
    """
    findings: list[Finding] = []
    looked_at: dict[str, list[Task]] = {}
    for split in SPLITS:
        on_split(split)
        try:
            tasks = env.tasks(split)
            looked_at[split] = sample_tasks(tasks, MAX_TASKS)
        except (Exception, SystemExit) as failure:
            make = error if split == "train" else warning
            findings.append(
                make(
                    f"tasks({split!r}) raised {type(failure).__name__}: {failure}",
                    f"return a sequence of Task for {split!r}",
                )
            )
            continue
        wrong = _check_split(split, looked_at[split]) or _check_repeatable(env, split, tasks)
        findings += wrong
    return findings + _check_disjoint(looked_at)


def sample_tasks(tasks: Sequence[Task], count: int) -> list[Task]:
    """Return at most ``count`` tasks, spread evenly over the sequence."""
    stride = max(1, -(-len(tasks) // count))
    return [tasks[index] for index in range(0, len(tasks), stride)]


def task_fault(item: Any) -> tuple[str, str] | None:
    """Return what is wrong with an item of a split and how to mend it; None for a sound task."""
    if not isinstance(item, Task):
        return f"a {type(item).__name__}", "return agentrl.Task(id=..., data={...})"
    if not isinstance(item.id, str):
        return f"a task whose id is a {type(item.id).__name__}", "make Task.id text"
    if not item.id or len(item.id) > MAX_ID_CHARS:
        what = f"a task with an id of {len(item.id)} characters, {item.id[:40]!r}"
        return what, f"make Task.id 1 to {MAX_ID_CHARS} characters long"
    try:
        item.id.encode()
    except UnicodeEncodeError:
        return f"a task whose id {item.id!r} is not valid UTF-8", "keep surrogates out of Task.id"
    if not isinstance(item.data, Mapping):
        what = f"task {item.id!r} whose data is a {type(item.data).__name__}"
        return what, "make Task.data a mapping"
    if not isinstance(item.tags, Mapping):
        what = f"task {item.id!r} whose tags are a {type(item.tags).__name__}"
        return what, "make Task.tags a mapping of text to text"
    if not all(isinstance(part, str) for pair in item.tags.items() for part in pair):
        what = f"task {item.id!r} which has tags that are not text: {dict(item.tags)!r}"
        return what, "make names and values of Task.tags text"
    return None


def _check_split(split: str, sample: list[Task]) -> list[Finding]:
    if not sample:
        make = error if split == "train" else warning
        return [make(f"tasks({split!r}) is empty", "return at least one task")]
    fault = next(filter(None, map(task_fault, sample)), None)
    if fault is not None:
        what, fix = fault
        return [error(f"tasks({split!r}) holds {what}", fix)]
    findings: list[Finding] = []
    duplicate = _first_duplicate([task.id for task in sample])
    if duplicate is not None:
        findings.append(
            error(f"tasks({split!r}) has the id {duplicate!r} twice", "give each task its own id")
        )
    return findings + next(filter(None, (_check_stored(task) for task in sample)), [])


def _check_repeatable(env: Any, split: str, tasks: Sequence[Task]) -> list[Finding]:
    first = [task.id for task in sample_tasks(tasks, 8)]
    if first == [task.id for task in sample_tasks(env.tasks(split), 8)]:
        return []
    return [
        error(
            f"tasks({split!r}) gives other tasks when asked again",
            "make task i a pure function of i: a resumed run looks it up again",
        )
    ]


def _check_stored(task: Task) -> list[Finding]:
    """Check that a task survives being written to a file and sent to another process."""
    try:
        data = json.loads(json.dumps(dict(task.data), allow_nan=False))
        pickle.loads(pickle.dumps(task))
    except Exception as failure:
        return [
            error(
                f"task {task.id!r} cannot be stored: {type(failure).__name__}: {failure}",
                "keep to text, finite numbers, bools, None, lists and dicts in Task.data",
            )
        ]
    if data != dict(task.data):
        return [
            warning(
                f"task {task.id!r} reads back from JSON as something else",
                "use lists instead of tuples, and text as keys, in Task.data",
            )
        ]
    return []


def _check_disjoint(splits: Mapping[str, list[Task]]) -> list[Finding]:
    findings: list[Finding] = []
    seen: dict[str, str] = {}
    for split, tasks in splits.items():
        tasks = [task for task in tasks if isinstance(task, Task)]
        overlap = [task for task in tasks if seen.get(content_of(task), split) != split]
        if overlap:
            other = seen[content_of(overlap[0])]
            findings.append(
                error(
                    f"{len(overlap)} of the {len(tasks)} {split} tasks looked at are in {other} "
                    f"too, {overlap[0].id!r} for one",
                    "keep the splits disjoint by content, or a held-out score means nothing",
                )
            )
        for task in tasks:
            seen.setdefault(content_of(task), split)
    return findings


def content_of(task: Task) -> str:
    """Return the content of a task as text, equal for tasks with equal data."""
    try:
        return json.dumps(dict(task.data), sort_keys=True, default=repr)
    except (TypeError, ValueError):  # keys that JSON cannot sort or hold; reported by now
        return repr(task.data)


def _first_duplicate(ids: Sequence[str]) -> str | None:
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            return name
        seen.add(name)
    return None
