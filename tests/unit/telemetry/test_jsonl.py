from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.telemetry.jsonl import JsonlTracker, missing_steps, read_metrics
from agentrl.telemetry.tracker import TrackedRun


def _log(folder: Path, steps: list[int], keep_through_step: int | None = None) -> None:
    tracker = JsonlTracker(TrackedRun(directory=folder, keep_through_step=keep_through_step))
    for step in steps:
        tracker.log({"reward/mean": step / 10}, step)
    tracker.close()


def test_steps_without_a_line_are_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert missing_steps(path, through=2) == [0, 1, 2]
    _log(tmp_path, [0, 1, 3])
    assert missing_steps(path, through=4) == [2, 4]
    assert missing_steps(path, through=1) == []
    path.write_text("")
    assert missing_steps(path, through=0) == [0]


def test_one_strict_json_object_per_step(tmp_path: Path) -> None:
    tracker = JsonlTracker(TrackedRun(directory=tmp_path))
    tracker.log({"a": np.float32(0.5), "b": np.array(3), "nan": math.nan, "inf": -math.inf}, 1)
    tracker.log({"note": "x\ny", "odd": {1}, "none": None, "flag": True}, 2)
    tracker.close()
    tracker.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    raw = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line, parse_constant=refuse) for line in raw]
    assert lines == [
        {"step": 1, "a": 0.5, "b": 3, "nan": "nan", "inf": "-inf"},
        {"step": 2, "note": "x\ny", "odd": "{1}", "none": None, "flag": True},
    ]
    first = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(first["nan"]) and first["inf"] == -math.inf  # type: ignore[arg-type]


def test_resume_cuts_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    _log(tmp_path, [1, 2, 3, 4, 5])
    _log(tmp_path, [4, 5, 6], keep_through_step=3)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_interrupted_and_resumed_file_equals_the_unbroken_one(tmp_path: Path) -> None:
    _log(tmp_path / "whole", [1, 2, 3, 4])
    _log(tmp_path / "broken", [1, 2, 3])
    with (tmp_path / "broken" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "rew')
    _log(tmp_path / "broken", [3, 4], keep_through_step=2)
    whole, broken = (tmp_path / name / "metrics.jsonl" for name in ("whole", "broken"))
    assert broken.read_bytes() == whole.read_bytes()


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(min_value=0), keep=st.integers(min_value=0, max_value=6))
def test_any_cut_of_the_file_is_repaired_without_losing_a_whole_line(
    tmp_path_factory: pytest.TempPathFactory, cut: int, keep: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    _log(folder, [1, 2, 3, 4, 5])
    path = folder / "metrics.jsonl"
    raw = path.read_bytes()
    cut %= len(raw) + 1
    path.write_bytes(raw[:cut])
    # A line that lacks only its line feed is whole.
    whole = [step for step in range(1, 6) if len(b"".join(raw.splitlines(True)[:step])) <= cut + 1]
    _log(folder, [], keep_through_step=keep)
    assert [line["step"] for line in read_metrics(path)] == [s for s in whole if s <= keep]
    assert path.read_bytes() == b"" or path.read_bytes().endswith(b"\n")


def test_two_logs_of_one_step_are_merged(tmp_path: Path) -> None:
    tracker = JsonlTracker(TrackedRun(directory=tmp_path))
    tracker.log({"reward/mean": 0.1}, 1)
    tracker.log({"val/env/success": 0.5}, 1)
    tracker.close()
    assert read_metrics(tracker.path) == [{"step": 1, "reward/mean": 0.1, "val/env/success": 0.5}]


def test_damage_before_the_last_line_is_refused_by_line_number(tmp_path: Path) -> None:
    _log(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(True)
    path.write_bytes(lines[0] + b"garbage\n" + lines[2])
    before = path.read_bytes()
    with pytest.raises(DataError, match="line 2 .*garbage"):
        _log(tmp_path, [4])
    assert path.read_bytes() == before


def test_lines_survive_kill_9(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from agentrl.telemetry.jsonl import JsonlTracker\n"
        "from agentrl.telemetry.tracker import TrackedRun\n"
        "t = JsonlTracker(TrackedRun(directory=Path(sys.argv[1])))\n"
        "[t.log({'x': i}, i) for i in range(3)]\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], timeout=60, env={**os.environ}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert [line["x"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_missing_file_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")
