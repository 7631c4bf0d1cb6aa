"""The preprocessing of GSM8K, on lines in its format."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.data.config import ColumnsConfig, DataConfig
from agentrl.data.load import read_tasks
from agentrl.rollout.tasks import check_disjoint

SCRIPT = Path(__file__).parents[3] / "examples" / "gsm8k" / "preprocess.py"
LINES = [
    {
        "question": "A shop sells 30 cups a day. How many in 40 days?",
        "answer": "It sells 30*40 = <<30*40=1200>>1200 cups.\n#### 1,200",
    },
    {
        "question": "Mia had 9 plums, ate 4 and was given “two”. How many are left? ",
        "answer": "9-4 = <<9-4=5>>5\n5+2 = <<5+2=7>>7\n#### 7",
    },
    *(
        {"question": f"Add {n} and 1.", "answer": f"{n}+1 = {n + 1}\n#### {n + 1}"}
        for n in range(8)
    ),
]


def run(*arguments: str, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == expect, done.stderr
    return done.stdout + done.stderr


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def test_the_files_become_tasks_in_both_formats(tmp_path: Path) -> None:
    raw, out = write(tmp_path / "raw.jsonl", LINES), tmp_path / "out"
    shown = run(raw, "--split", "train", "--out", str(out), "--val-rows", "3", "--parquet")
    assert f"{out / 'train.jsonl'}: 7 tasks" in shown and f"{out / 'val.parquet'}: 3 tasks" in shown
    columns = ColumnsConfig(id="id")
    lines = DataConfig(train=str(out / "train.jsonl"), val=str(out / "val.jsonl"), columns=columns)
    tables = DataConfig(train=str(out / "train.parquet"), val=str(out / "val.parquet"))
    found: dict[str, str] = {}
    for config in (lines, tables):
        train, val = read_tasks(config, "train"), read_tasks(config, "val")
        check_disjoint(train, val, split="val")
        found = {json.dumps(task.data["prompt"]): task.data["answer"] for task in train + val}
        assert len(found) == 10
        answers = list(found.values())
        assert sorted(answers, key=int) == ["1", "2", "3", "4", "5", "6", "7", "7", "8", "1200"]
    first = read_tasks(tables, "train")[0]
    assert first.data["data_source"] == "openai/gsm8k"
    assert first.data["reward_model"] == {"style": "rule", "ground_truth": first.data["answer"]}
    assert "####" in first.data["prompt"][0]["content"]
    again = tmp_path / "again"
    run(raw, "--split", "train", "--out", str(again), "--val-rows", "3")
    assert (again / "val.jsonl").read_bytes() == (out / "val.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "How many?", "answer": "7"}, "raw.jsonl, line 2: the answer must hold ####"),
        ({"question": "How many?", "answer": "#### 1\n#### 2"}, "line 2: the answer must hold"),
        ({"prompt": "How many?", "answer": "#### 1"}, "line 2: want texts 'question' and 'answer'"),
    ],
)
def test_a_line_that_is_no_problem_is_named(
    tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    raw = write(tmp_path / "raw.jsonl", [LINES[0], line])
    shown = run(raw, "--split", "test", "--out", str(tmp_path / "out"), expect=1)
    assert message in shown and "Traceback" not in shown
    assert not (tmp_path / "out").exists()


def test_more_rows_for_validation_than_there_are_is_refused(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.jsonl", LINES)
    arguments = (raw, "--split", "train", "--out", str(tmp_path / "out"), "--val-rows", "10")
    assert "must be less than the 10 rows" in run(*arguments, expect=1)
