from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agentrl_envs.code_sandbox import CodeSandbox
from agentrl_envs.code_sandbox.humaneval import docstring_examples, humaneval_tasks
from agentrl_envs.code_sandbox.problem import problem_of
from agentrl_envs.code_sandbox.tasks import load_tasks, read_tasks

from agentrl.errors import ConfigError, DataError, EnvError


def row(name: str = "double", **changes: Any) -> dict[str, Any]:
    return {
        "task_id": name,
        "prompt": f"Write {name}(x).",
        "entry_point": "double",
        "visible_tests": [{"args": [2], "expected": 4}],
        "hidden_tests": [{"args": [], "kwargs": {"x": 5}, "expected": 10}],
    } | changes


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(r) if not isinstance(r, str) else r}\n" for r in rows))
    return path


def test_a_file_gives_tasks_with_their_splits(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        row("a", split="train"),
        "",
        row("b", split="test"),
        row("c", split="val"),
    )
    splits = read_tasks(path)
    assert {name: [t.id for t in tasks] for name, tasks in splits.items()} == {
        "train": ["a"], "val": ["c"], "test": ["b"],
    }  # fmt: skip
    problem = problem_of(splits["train"][0].data)
    assert (problem.entry_point, problem.visible[0].args) == ("double", [2])
    assert problem.hidden[0].kwargs == {"x": 5}


def test_without_splits_tasks_are_divided_by_prompt(tmp_path: Path) -> None:
    rows = [row(f"t{i}", prompt=f"Write number {i // 2}.") for i in range(400)]
    splits = read_tasks(write(tmp_path / "t.jsonl", *rows))
    sizes = {name: len(tasks) for name, tasks in splits.items()}
    assert sum(sizes.values()) == 400 and sizes["train"] > 200 and min(sizes.values()) > 10
    prompts = {name: {t.data["prompt"] for t in tasks} for name, tasks in splits.items()}
    assert not prompts["train"] & prompts["test"] and not prompts["train"] & prompts["val"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "there is no task in it"),
        (["", "  "], "there is no task in it"),
        ([row(), "{"], "line 2, column 2"),
        ([row(), "[1]"], "line 2: must be a JSON object, got list"),
        (['{"task_id": NaN}'], "line 1: NaN is no JSON number"),
        (['{"task_id": -1e999}'], "line 1: -1e999 is beyond every float"),
        ([row("a"), row(5)], r"line 2, column task_id: must be text .* got '5' \(int\)"),  # type: ignore[arg-type]
        ([row("a"), row("a")], "line 2: task_id 'a' was used on line 1"),
        ([row(prompt=None)], "line 1, column prompt"),
        ([row(prompt="  ")], "line 1, column prompt"),
        ([row(entry_point="2x")], "line 1, column entry_point: '2x' is no name"),
        ([row(entry_point="def")], "line 1, column entry_point"),
        ([row(visible_tests=None)], "line 1, column visible_tests: must be a list"),
        ([row(hidden_tests=[])], "line 1, column hidden_tests: is empty"),
        ([row(hidden_tests=[3])], r"line 1, column hidden_tests\[0\]: must be an object, got int"),
        ([row(hidden_tests=[{"args": 1, "expected": 1}])], r"column hidden_tests\[0\].args: must"),
        ([row(hidden_tests=[{"args": []}])], r"column hidden_tests\[0\].expected: is missing"),
        (
            [row(hidden_tests=[{"args": [], "kwargs": [], "expected": 1}])],
            r"column hidden_tests\[0\].kwargs",
        ),
        (
            [row(hidden_tests=[{"args": [], "expect": 1}])],
            r"column hidden_tests\[0\].expect: is no field; did you mean 'expected'",
        ),
        ([row(promt="x")], "line 1, column promt: is no field; did you mean 'prompt'"),
        ([row(split="dev")], "line 1, column split: must be one of train, val, test"),
        ([row("a", split="train"), row("b")], "line 2: split is missing, but line 1 has one"),
        (["[" * 100_000], "line 1"),
    ],
)
def test_a_bad_file_is_refused_with_line_and_column(
    tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_tasks(write(tmp_path / "t.jsonl", *rows))


def test_bytes_that_are_no_text_and_a_mark_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(DataError, match="byte 0 is not UTF-8"):
        read_tasks(path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(row()).encode() + b"\r\n")
    assert sum(len(tasks) for tasks in read_tasks(path).values()) == 1


def test_line_separators_inside_text_do_not_split_a_line(tmp_path: Path) -> None:
    text = json.dumps(row(prompt="a\u2028b\x85c"), ensure_ascii=False)
    splits = read_tasks(write(tmp_path / "t.jsonl", text))
    assert sum(len(tasks) for tasks in splits.values()) == 1


def test_a_missing_file_or_an_empty_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="give 'procedural', 'humaneval', or the path"):
        CodeSandbox(source="prozedural").tasks("train")
    path = write(tmp_path / "t.jsonl", row(split="train"))
    env = CodeSandbox(source=str(path))
    assert len(env.tasks("train")) == 1
    with pytest.raises(DataError, match="no task is in the split 'val'"):
        env.tasks("val")
    with pytest.raises(EnvError, match="has the splits"):
        env.tasks("dev")
    with pytest.raises(EnvError, match="no demonstrations"):
        env.demonstrations("train", 0)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", row("a", split="train"))
    assert len(load_tasks(str(path), 1, "train")) == 1
    write(path, row("a", split="train"), row("b", split="train"))
    assert len(load_tasks(str(path), 1, "train")) == 2


def test_arguments_that_make_no_sense_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"max_calls": 0}, {"visible_reward": -1.0}, {"grade_timeout_s": 0.0},
    ]  # fmt: skip
    for kwargs in wrong:
        with pytest.raises(ConfigError, match="must be at least"):
            CodeSandbox(**kwargs)
    with pytest.raises(ConfigError, match="level"):
        CodeSandbox(level=9).tasks("train")


def test_humaneval_has_disjoint_splits_and_runnable_problems() -> None:
    everything = humaneval_tasks("all")
    splits = [{t.id for t in humaneval_tasks(name)} for name in ("train", "val", "test")]
    assert len(everything) == 164 == sum(map(len, splits)) == len(set.union(*splits))
    for task in everything:
        problem = problem_of(task.data)
        compile(problem.preamble, "preamble", "exec")
        assert problem.test_program and "def check" in problem.test_program
        assert f"def {problem.entry_point}" not in problem.preamble
        assert json.loads(json.dumps(dict(task.data))) == dict(task.data)
    assert "def poly" in problem_of(everything[32].data).preamble


def test_docstring_examples_on_literals_become_visible_tests() -> None:
    source = '''
def f(x, k=1):
    """ Text.
    >>> f([1, 2], k=3)
    (3, 'a')
    >>> f(other(1))
    2
    >>> g(1)
    1
    >>> f({1})
    {2}
    >>> f(
    """
'''
    assert list(docstring_examples(source, "f")) == [
        {"args": [[1, 2]], "kwargs": {"k": 3}, "expected": [3, "a"]}
    ]
