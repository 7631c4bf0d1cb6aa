"""From rows to tasks: the column map, the types of columns, and ids.

A task's ``data`` is its row, with the mapped columns under the names ``prompt`` and ``answer`` and
without the column of ids. The layout of verl's parquet files needs no map: ``prompt`` (chat
messages), ``data_source``, ``reward_model.ground_truth`` and ``extra_info.{split,index}`` are found
where they are; and a row that lacks ``reward_model`` gets one with its answer, so that a reward
function with verl's signature grades the tasks of any file.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.data.config import ColumnsConfig
from agentrl.data.table import Row, Table, show
from agentrl.errors import DataError
from agentrl.types import Task

GROUND_TRUTH = "reward_model.ground_truth"
_INDEX = "extra_info.index"
_KINDS: dict[type, str] = {
    str: "text",
    bool: "truth values",
    int: "numbers",
    float: "numbers",
    list: "lists",
    dict: "objects",
}
_ROLES = ("system", "user", "assistant", "tool")
_MAX_ID_CHARS = 500
_ABSENT = object()


def to_tasks(tables: Sequence[Table], columns: ColumnsConfig, *, key: str) -> list[Task]:
    """Turn rows into tasks, in their order.

    Args:
        key: the setting that named the files, for messages: ``data.train``.

    Raises:
        DataError: no rows, a column that is missing, empty or of mixed types in some row, or two
            tasks with one id; names file, row and column.
    """
    if not any(len(table.rows) for table in tables):
        names = ", ".join(table.name for table in tables)
        raise DataError(f"{key}: no rows in {names}; a run needs at least one task")
    columns = _resolved(tables, columns, key=key)
    _refuse_mixed_types(tables, columns)
    tasks: list[Task] = []
    places: dict[str, tuple[Table, int]] = {}
    for table in tables:
        for index, row in enumerate(table.rows):
            task = _task(row, columns, table, index)
            first = places.setdefault(task.id, (table, index))
            if first != (table, index):
                raise DataError(_repeated(task.id, columns, first, (table, index)))
            tasks.append(task)
    return tasks


def lookup(row: Row, path: str) -> Any:
    """Return a column, or a field of one (``a.b``); a marker of its own where there is none."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _ABSENT
        value = value[part]
    return value


# ----------------------------------------------------------------- columns


def _resolved(tables: Sequence[Table], columns: ColumnsConfig, *, key: str) -> ColumnsConfig:
    """Return the map with what is found by itself filled in; refuse columns that are nowhere."""
    known = list(dict.fromkeys(name for table in tables for row in table.rows for name in row))
    first = next(row for table in tables for row in table.rows)

    def exists(path: str) -> bool:
        return path in known or lookup(first, path) is not _ABSENT

    answer, id_column = columns.answer, columns.id
    if answer == "answer" and not exists(answer) and exists(GROUND_TRUTH):
        answer = GROUND_TRUTH
    if id_column is None and lookup(first, _INDEX) not in (_ABSENT, None):
        id_column = _INDEX
    wanted = {"prompt": columns.prompt, "answer": answer, "id": id_column}
    wanted |= {f"tags[{index}]": name for index, name in enumerate(columns.tags)}
    for setting, path in wanted.items():
        if path is not None and not exists(path):
            left_out = {name for table in tables for name in table.left_out}
            raise DataError(_missing(path, setting, known, left_out, key=key))
    return ColumnsConfig(
        prompt=columns.prompt, answer=answer, id=id_column, tags=list(columns.tags)
    )


def _missing(path: str, setting: str, known: Sequence[str], left_out: set[str], *, key: str) -> str:
    if path in left_out:
        return f"{key}: the column {path!r} holds values that no task can carry, such as bytes"
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    without = f", or null where tasks have no {setting}" if setting in ("prompt", "answer") else ""
    return (
        f"{key} has no column {path!r}; {hint}its columns: {', '.join(known)}. "
        f"Set data.columns.{setting}=COLUMN{without}"
    )


def _refuse_mixed_types(tables: Sequence[Table], columns: ColumnsConfig) -> None:
    """Compare the kind of each column's values with that of its first one; None fits all."""
    nested = [
        path
        for path in (columns.prompt, columns.answer, columns.id, *columns.tags)
        if path is not None and "." in path
    ]
    first: dict[str, tuple[type, str]] = {}
    for table in tables:
        for index, row in enumerate(table.rows):
            values = row.items()
            if nested:
                values = (*values, *((path, lookup(row, path)) for path in nested))
            for name, value in values:
                kind = type(value)
                known = first.get(name)
                if known is None:
                    if kind in _KINDS:
                        first[name] = (kind, table.place(index))
                elif known[0] is not kind and kind in _KINDS and _KINDS[known[0]] != _KINDS[kind]:
                    raise DataError(
                        f"{table.place(index)}, column {name!r}: {show(value)} among "
                        f"{_KINDS[known[0]]} ({known[1]}): a column holds values of one type; "
                        "write all of them the same way"
                    )


# ------------------------------------------------------------------- tasks


def _task(row: Row, columns: ColumnsConfig, table: Table, index: int) -> Task:
    def fault(column: str | None, what: str) -> DataError:
        return DataError(f"{table.place(index)}, column {column!r}: {what}")

    taken = {columns.prompt, columns.answer, columns.id} - {None}
    data: dict[str, Any] = {name: value for name, value in row.items() if name not in taken}
    if columns.prompt is not None:
        try:
            data["prompt"] = check_prompt(lookup(row, columns.prompt))
        except ValueError as error:
            raise fault(columns.prompt, str(error)) from error
    if columns.answer is not None:
        answer = lookup(row, columns.answer)
        if answer is None or answer is _ABSENT:
            raise fault(columns.answer, "no answer; give one, or leave the row out")
        data["answer"] = answer
        if "reward_model" not in data and "ground_truth" not in data:
            data["reward_model"] = {"style": "rule", "ground_truth": answer}
    tags = dict(_tags(row, columns, fault))
    return Task(id=_id_of(row, columns, fault), data=data, tags=tags)


def check_prompt(value: Any) -> str | list[dict[str, Any]]:
    """Return a prompt: text, or chat messages without the empty fields that tables add.

    Raises:
        ValueError: it is neither, is empty, or ends with an answer.
    """
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("an empty prompt; give one, or leave the row out")
        return value
    if not isinstance(value, list):
        none = value is None or value is _ABSENT
        raise ValueError(
            "no prompt; give one, or leave the row out"
            if none
            else f"{show(value)} is no prompt: want text, or a list of messages"
        )
    messages = [_message(item, position) for position, item in enumerate(value)]
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError("the messages must end with one to answer, of the user or a tool")
    return messages


def _message(item: Any, position: int) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise ValueError(f"message {position} is {show(item)}; want {{role: ..., content: ...}}")
    if item.get("role") not in _ROLES:
        raise ValueError(
            f"message {position} has the role {item.get('role')!r}; known: {', '.join(_ROLES)}"
        )
    if not isinstance(item.get("content"), str):
        raise ValueError(f"message {position} has the content {show(item.get('content'))}: no text")
    return {name: field for name, field in item.items() if field is not None}


def _tags(row: Row, columns: ColumnsConfig, fault: Any) -> Iterator[tuple[str, str]]:
    for name in columns.tags:
        value = lookup(row, name)
        if not isinstance(value, str | int | float):
            shown = "nothing" if value is _ABSENT else show(value)
            raise fault(name, f"{shown} is no tag: want text, a number or a truth value")
        yield name, value if isinstance(value, str) else json.dumps(value)


def _id_of(row: Row, columns: ColumnsConfig, fault: Any) -> str:
    if columns.id is None:
        text = json.dumps(row, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    value = lookup(row, columns.id)
    if isinstance(value, bool) or not isinstance(value, str | int):
        shown = "nothing" if value is _ABSENT else show(value)
        raise fault(columns.id, f"{shown} is no id: want text or a whole number")
    parts = [str(value)]
    if columns.id == _INDEX:  # a count within a split of a source
        around = (lookup(row, "data_source"), lookup(row, "extra_info.split"))
        parts = [*(part for part in around if isinstance(part, str) and part), *parts]
    name = "/".join(parts)
    if not 0 < len(name) <= _MAX_ID_CHARS or name.encode("utf-8", "ignore").decode() != name:
        raise fault(columns.id, f"{show(name)} is no id: want 1 to {_MAX_ID_CHARS} characters")
    return name


def _repeated(
    name: str, columns: ColumnsConfig, first: tuple[Table, int], again: tuple[Table, int]
) -> str:
    places = f"{first[0].place(first[1])} and {again[0].place(again[1])}"
    if columns.id is None:
        return f"{places} hold the same task; leave one out, since seeds derive from the content"
    return (
        f"{places} have one id, {name!r} (from {columns.id!r}); ids must differ, since seeds "
        "derive from them: mend them, or name a column without repetitions in data.columns.id"
    )
