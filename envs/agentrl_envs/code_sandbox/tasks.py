"""Where tasks come from: the generator, HumanEval, or a file of the user's.

The file has one JSON object a line::

    {"task_id": "double", "prompt": "Write double(x): twice x.", "entry_point": "double",
     "visible_tests": [{"args": [2], "expected": 4}],
     "hidden_tests": [{"args": [5], "expected": 10},
                      {"args": [], "kwargs": {"x": 0}, "expected": 0}],
     "split": "train"}

``visible_tests`` may be empty, ``kwargs`` and ``split`` may be left out. Where no line has a split,
each task is put into train (70 %), val (10 %) or test (20 %) by a hash of its prompt.
"""

from __future__ import annotations

import difflib
import json
import keyword
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from agentrl.errors import DataError, EnvError
from agentrl.seeding import derive_seed
from agentrl.types import Task
from agentrl_envs.code_sandbox.generate import GeneratedTasks
from agentrl_envs.code_sandbox.humaneval import humaneval_tasks

SPLITS = ("train", "val", "test")
_FIELDS = ("task_id", "prompt", "entry_point", "visible_tests", "hidden_tests", "split")
_TEST_FIELDS = ("args", "kwargs", "expected")


def load_tasks(source: str, level: int, split: str) -> Sequence[Task]:
    """Return the tasks of a split.

    Args:
        source: ``procedural``, ``humaneval``, or the path of a JSONL file.
        level: difficulty of procedural tasks.
        split: ``train``, ``val`` or ``test``; HumanEval has ``all`` besides.

    Raises:
        EnvError: there is no such split.
        ConfigError: there is no such level.
        DataError: the file cannot be used, or has no task for the split.
    """
    if source == "humaneval":
        return humaneval_tasks(split)
    if split not in SPLITS:
        raise EnvError(f"code_sandbox has the splits {', '.join(SPLITS)}, got {split!r}")
    if source == "procedural":
        return GeneratedTasks(level, split)
    path = Path(source).expanduser()
    if not path.is_file():
        raise DataError(
            f"env.kwargs.source: no file {str(path)!r}; give 'procedural', 'humaneval', or the "
            f"path of a JSONL file, relative to {Path.cwd()}"
        )
    stat = path.stat()
    tasks = _read(path.resolve(), stat.st_mtime_ns, stat.st_size)[split]
    if not tasks:
        raise DataError(
            f'{path}: no task is in the split {split!r}; give some lines "split": "{split}"'
        )
    return tasks


@lru_cache(maxsize=8)
def _read(path: Path, mtime_ns: int, num_bytes: int) -> dict[str, list[Task]]:
    """Read a file once, again when it has changed."""
    return read_tasks(path)


def read_tasks(path: Path) -> dict[str, list[Task]]:
    """Read a JSONL file.

    Returns:
        The tasks of each split, in the order of the file.

    Raises:
        DataError: names the line and the field that is wrong.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from error
    rows = [
        (number, _Row(path, number, line).parsed())
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not rows:
        raise DataError(f"{path}: there is no task in it; write one JSON object a line")
    with_split = [number for number, row in rows if "split" in row]
    if with_split and len(with_split) < len(rows):
        number = next(number for number, row in rows if "split" not in row)
        raise DataError(
            f"{path}, line {number}: split is missing, but line {with_split[0]} has one; "
            "give it on every line or on none"
        )
    splits: dict[str, list[Task]] = {split: [] for split in SPLITS}
    first_line: dict[str, int] = {}
    for number, row in rows:
        other = first_line.setdefault(row["task_id"], number)
        if other != number:
            raise DataError(
                f"{path}, line {number}: task_id {row['task_id']!r} was used on line {other}; "
                "ids must be unique"
            )
        split = row.get("split") or _split_of(row["prompt"])
        data = {name: row[name] for name in _FIELDS[1:5]}
        splits[split].append(Task(id=row["task_id"], data=data, tags={"source": path.name}))
    return splits


def _split_of(prompt: str) -> str:
    percent = derive_seed("code_sandbox prompt", prompt) % 100
    return "train" if percent < 70 else "val" if percent < 80 else "test"


class _Row:
    """One line of the file; every complaint names it."""

    def __init__(self, path: Path, number: int, line: str) -> None:
        self._where = f"{path}, line {number}"
        self._line = line

    def parsed(self) -> dict[str, Any]:
        """Return the checked object."""
        row = self._json()
        self._known(row, _FIELDS, "")
        for name in ("task_id", "prompt", "entry_point"):
            self._text(row, name)
        entry_point = row["entry_point"]
        if not entry_point.isidentifier() or keyword.iskeyword(entry_point):
            self._refuse("entry_point", f"{entry_point!r} is no name of a function")
        for name in ("visible_tests", "hidden_tests"):
            self._tests(row, name)
        if not row["hidden_tests"]:
            self._refuse("hidden_tests", "is empty: nothing could be graded")
        if "split" in row and row["split"] not in SPLITS:
            self._refuse("split", f"must be one of {', '.join(SPLITS)}, got {row['split']!r}")
        return row

    def _json(self) -> dict[str, Any]:
        def no_constant(name: str) -> NoReturn:
            raise DataError(f"{self._where}: {name} is no JSON number; use null or a finite number")

        def finite(text: str) -> float:
            if math.isinf(number := float(text)):
                raise DataError(f"{self._where}: {text:.40} is beyond every float; give less")
            return number

        try:
            row = json.loads(self._line, parse_constant=no_constant, parse_float=finite)
        except json.JSONDecodeError as error:
            raise DataError(f"{self._where}, column {error.colno}: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self._where}: {error}") from error
        if not isinstance(row, dict):
            raise DataError(
                f"{self._where}: must be a JSON object, got {type(row).__name__}; see "
                "agentrl_envs.code_sandbox.tasks for the fields"
            )
        return row

    def _tests(self, row: Mapping[str, Any], name: str) -> None:
        tests = row.get(name)
        if not isinstance(tests, list):
            self._refuse(name, f"must be a list, got {_got(row, name)}")
        for position, test in enumerate(tests):
            place = f"{name}[{position}]"
            if not isinstance(test, dict):
                self._refuse(place, f"must be an object, got {type(test).__name__}")
            self._known(test, _TEST_FIELDS, f"{place}.")
            if not isinstance(test.get("args"), list):
                self._refuse(f"{place}.args", f"must be a list, got {_got(test, 'args')}")
            if not isinstance(test.get("kwargs", {}), dict):
                self._refuse(f"{place}.kwargs", f"must be an object, got {_got(test, 'kwargs')}")
            if "expected" not in test:
                self._refuse(f"{place}.expected", "is missing")

    def _text(self, row: Mapping[str, Any], name: str) -> None:
        if not isinstance(row.get(name), str) or not row[name].strip():
            self._refuse(name, f"must be text that is not empty, got {_got(row, name)}")

    def _known(self, row: Mapping[str, Any], names: Sequence[str], prefix: str) -> None:
        for name in row:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
                self._refuse(f"{prefix}{name}", f"is no field{hint}")

    def _refuse(self, column: str, what: str) -> NoReturn:
        raise DataError(f"{self._where}, column {column}: {what}")


def _got(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        return "nothing: it is missing"
    value = row[name]
    return f"{str(value)[:40]!r} ({type(value).__name__})"
