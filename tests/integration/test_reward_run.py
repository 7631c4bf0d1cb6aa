"""Whole runs of the command with a reward of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 280
SMALL = [
    "model.warm_start.steps=2", "model.warm_start.episodes_per_step=8", "rollout.n=2",
    "trainer.prompts_per_step=2", "trainer.total_steps=1", "eval.val_tasks=2", "eval.test_tasks=2",
    "telemetry.trackers=[]", "telemetry.report=false",
]  # fmt: skip
SOURCE = """
def brief(episode, limit: int):
    turns = len(episode.turns)
    return {"score": 1.0 if turns <= limit else -1.0, "turns": turns}

def broken(episode):
    raise ValueError("the answer key is missing")
"""


def agentrl(folder: Path, *arguments: str, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", *arguments],
        env=os.environ | {"AGENTRL_CACHE": str(folder / "cache"), "OMP_WAIT_POLICY": "PASSIVE"},
        cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert (done.returncode == 0) == (expect == 0), done.stderr[-6000:]
    return done.stdout if expect == 0 else done.stdout + done.stderr


def report_of(out: str) -> list[dict[str, Any]]:
    return json.loads(out[out.index("{") : out.rindex("}") + 1])["results"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reward")
    (made / "r.py").write_text(SOURCE)
    return made


def test_a_run_trains_and_is_evaluated_on_a_function_of_a_file(folder: Path):
    agentrl(
        folder, "train", "--env", "guess_number", *SMALL, "trainer.run_dir=run",
        "reward.path=./r.py:brief", "reward.kwargs.limit=99", "reward.overlong.buffer_tokens=4",
    )  # fmt: skip
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    step = next(line for line in lines if "reward_parts/score" in line)
    assert step["reward_parts/score"] == 1.0
    assert step["reward_parts/score/turns"] >= 1.0
    assert step["reward_parts/overlong"] <= 0.0
    out = agentrl(
        folder, "eval", "--model", "run", "-n", "1", "--tasks", "2", "--json",
        "reward.kwargs.limit=0",
    )  # fmt: skip
    [overall] = [row for row in report_of(out) if row["stratum"] == "all"]
    assert (overall["reward"], overall["success"]["mean"]) == (-1.0, 0.0)


def test_a_run_does_not_go_on_with_another_function_of_the_same_name(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "r.py").write_text(SOURCE)
    settings = [*SMALL, "reward.path=./r.py:brief", "reward.kwargs.limit=99"]
    agentrl(tmp_path, "train", "--env", "guess_number", *settings, "trainer.run_dir=run")
    (tmp_path / "r.py").write_text(SOURCE.replace("1.0 if", "0.5 if"))
    out = agentrl(tmp_path, "train", "--resume", "run", expect=2)
    assert "the file of reward.path was" in out and "force_resume" in out


def test_a_function_that_always_fails_stops_the_run_with_its_name(folder: Path):
    out = agentrl(
        folder, "train", "--env", "guess_number", *SMALL, "trainer.run_dir=failing",
        "reward.path=./r.py:broken", expect=1,
    )  # fmt: skip
    assert "reward part 'score'" in out and "the answer key is missing" in out


def test_a_wrong_signature_is_refused_before_a_model_is_made(folder: Path):
    (folder / "odd.py").write_text("def f(text): return 1.0\n")
    out = agentrl(
        folder, "train", "--env", "guess_number", *SMALL, "trainer.run_dir=odd",
        "model.warm_start.steps=3", "reward.path=./odd.py:f", expect=1,
    )  # fmt: skip
    assert "fn(episode, **kwargs)" in out and "ground_truth" in out
    assert "warm start" not in out
    assert not (folder / "odd").exists()
