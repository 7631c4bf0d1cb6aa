"""Whole runs on tasks from files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.telemetry.trajectory_io import read_trajectories

SMALL = [
    "model.warm_start.steps=40",
    "trainer.prompts_per_step=4",
    "rollout.n=4",
    "rollout.max_turn_tokens=32",
    "eval.val_tasks=4",
    "eval.test_tasks=4",
    "telemetry.trackers=[]",
    "telemetry.report=false",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def agentrl(cache: Path, *arguments: str, expect: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", *arguments],
        env=os.environ | {"AGENTRL_CACHE": str(cache), "OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == expect, done.stderr[-6000:]
    return done.stdout + done.stderr


def write(path: Path, numbers: Sequence[int]) -> Path:
    """Questions in the style of GSM8K, the last one too long."""
    rows = [
        {
            "question": f"Bo has {n} pens and gets {n % 5} more. How many pens?",
            "answer": f"{n}+{n % 5}={n + n % 5}\n#### {n + n % 5}",
            "odd": n % 2 == 1,
        }
        for n in numbers
    ]
    rows.append({**rows[0], "question": "Bo " + "and Flo " * 200 + "have 3 pens."})
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def played(run: Path) -> list[list[str]]:
    """Ids of the tasks of each step, in order."""
    files = sorted((run / "trajectories").glob("step_*.jsonl"))
    return [list(dict.fromkeys(t.task.id for t in read_trajectories(file))) for file in files]


def settings(tmp_path: Path) -> list[str]:
    return [
        *SMALL,
        f"data.train={write(tmp_path / 'train.jsonl', range(10, 20))}",
        f"data.val={write(tmp_path / 'val.jsonl', range(30, 36))}",
        "data.columns={prompt: question, tags: [odd]}",
        "data.max_prompt_tokens=200",
    ]


def test_a_run_on_a_file_counts_its_epochs_and_drops_what_is_too_long(
    cache: Path, tmp_path: Path
) -> None:
    # 10 tasks are left, 4 to a step: two thirds of them take 2 steps.
    run = tmp_path / "run"
    shown = agentrl(
        cache,
        *("train", "--env", "qa", *settings(tmp_path), "trainer.epochs=0.66"),
        f"trainer.run_dir={run}",
    )
    assert f"10 train ({tmp_path / 'train.jsonl'}; 1 prompts too long)" in " ".join(shown.split())
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["data/dropped_long"] == 1 for line in lines[1:])
    assert "val/qa/success" in lines[0] and "test/qa/success" in lines[-1]
    tasks = [t.task for t in read_trajectories(run / "trajectories" / "step_000001.jsonl")]
    assert all(task.tags["odd"] in ("true", "false") for task in tasks)
    assert all(task.data["prompt"].startswith("Bo has 1") for task in tasks)
    first, second = played(run)
    assert len({*first, *second}) == 8, "within an epoch no task comes twice"
    measured = agentrl(cache, "eval", "--model", str(run), "--split", "val", "-n", "1", "--json")
    result = json.loads(measured[measured.index("{") : measured.rindex("}") + 1])
    assert result["results"][0]["samples"] == 6, "the file of the run, without what is too long"
    agentrl(cache, "train", "--resume", str(run), expect=2)
    write(tmp_path / "train.jsonl", range(10, 21))
    changed = agentrl(cache, "train", "--resume", str(run), "trainer.force_resume=false", expect=2)
    assert "training tasks are not those" in " ".join(changed.split())
    assert len(metrics_of(run)) == 3, "a refused resume changes nothing"


def test_a_resumed_run_with_a_curriculum_equals_the_unbroken_one(
    cache: Path, tmp_path: Path
) -> None:
    shared = [
        *settings(tmp_path),
        "data.curriculum.id=success_band",
        "data.curriculum.kwargs={low: 0.05, revisit_after: 1}",
        "actor.schedule=constant",
        "trainer.eval_every=0",
        "eval.test_tasks=1",
    ]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    start = ("train", "--env", "qa", *shared)
    agentrl(cache, *start, "trainer.total_steps=6", f"trainer.run_dir={whole}")
    agentrl(cache, *start, "trainer.total_steps=4", f"trainer.run_dir={halves}")
    agentrl(cache, "train", "--resume", str(halves), "trainer.total_steps=6")
    assert played(halves) == played(whole)
    skipped = [
        [line["curriculum/skipped"] for line in metrics_of(run)[1:]] for run in (whole, halves)
    ]
    assert skipped[0] == skipped[1]
    assert sum(skipped[0]) > 0, "nothing was skipped: nothing was tested"
