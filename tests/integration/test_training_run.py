"""Whole runs of the command, on real environments with real sandboxes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.dist.sharded_state import load_full, read_values
from agentrl.telemetry.trajectory_io import iter_stored, read_trajectories, tokens_path
from agentrl.train.open_model import open_run_model
from agentrl.train.state_file import read_state
from agentrl.types import Trajectory

HERE = Path(__file__).parent
SOAK = os.environ.get("AGENTRL_SOAK") == "1"
# Small enough for seconds, large enough that groups differ and several mini-batches are made.
SMALL = [
    "model.warm_start.steps=40",
    "trainer.prompts_per_step=6",
    "rollout.n=4",
    "eval.val_tasks=12",
    "eval.test_tasks=12",
    "telemetry.trackers=[]",
]
TIMEOUT_S = 280


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One warm start per environment for all tests of this file."""
    return tmp_path_factory.mktemp("cache")


def start(
    cache: Path, *arguments: str, program: Sequence[str] = ("-m", "agentrl.cli.main")
) -> subprocess.Popen[str]:
    env = os.environ | {"AGENTRL_CACHE": str(cache), "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def agentrl(cache: Path, *arguments: str, expect: int = 0) -> str:
    process = start(cache, *arguments)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == expect, err[-6000:]
    return out + err


def train(cache: Path, run: Path, env: str, *settings: str) -> list[dict[str, Any]]:
    agentrl(cache, "train", "--env", env, *SMALL, f"trainer.run_dir={run}", *settings)
    return metrics_of(run)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics without what depends on the clock, or counts since the process began."""
    return {
        key: value
        for key, value in line.items()
        if not key.startswith(("timing_s/", "throughput/", "weight_sync/seconds", "serving/"))
    }


@pytest.fixture(scope="module")
def whole_run(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of code_sandbox in one piece."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(cache, run, "code_sandbox", "trainer.total_steps=4", "trainer.save_every=2")
    return run


@pytest.mark.parametrize("killed_in_step", [1, 2, 3] if SOAK else [3])
def test_two_halves_around_a_kill_equal_the_whole_bit_for_bit(
    cache: Path, whole_run: Path, tmp_path: Path, killed_in_step: int
) -> None:
    run = tmp_path / "run"
    process = start(
        cache,
        *("train", "--env", "code_sandbox", *SMALL, f"trainer.run_dir={run}"),
        *("trainer.total_steps=4", "trainer.save_every=2"),
    )
    _wait_for(run / "trajectories" / f"step_{killed_in_step:06d}.jsonl", process)
    if killed_in_step == 3:
        assert (run / "checkpoints" / "step_000002").is_dir(), "killed before anything was saved"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    assert not (run / "checkpoints" / "step_000004").exists(), "it had finished: nothing was tested"
    agentrl(cache, "train", "--resume", str(run))
    _assert_same_run(whole_run, run)


@pytest.mark.parametrize(("moment", "step"), [("collect", 4), ("update", 3)])
def test_sigterm_saves_and_what_is_resumed_equals_the_whole_bit_for_bit(
    cache: Path, whole_run: Path, tmp_path: Path, moment: str, step: int
) -> None:
    """What is being collected is given up; an update that has begun is finished first."""
    run = tmp_path / "run"
    process = start(
        cache,
        *("train", "--env", "code_sandbox", *SMALL, f"trainer.run_dir={run}"),
        *("trainer.total_steps=4", "trainer.save_every=2"),
        program=[str(HERE / "signal_at.py"), "SIGTERM", moment, str(step)],
    )
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 75, err[-6000:]
    last = err.splitlines()[-1]
    assert "Preempted: stopped by SIGTERM after step 3 of 4" in last
    assert f"agentrl train --resume {run}" in last
    names = [path.name for path in (run / "checkpoints").iterdir()]
    assert sorted(names) == ["step_000002", "step_000003"]
    agentrl(cache, "train", "--resume", str(run))
    _assert_same_run(whole_run, run)


def test_ctrl_c_says_what_is_saved_and_how_to_go_on(cache: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(
        cache,
        *("train", "--env", "code_sandbox", *SMALL, f"trainer.run_dir={run}"),
        *("trainer.total_steps=4", "trainer.save_every=1", "telemetry.quiet=true"),
        program=[str(HERE / "signal_at.py"), "SIGINT", "collect", "2"],
    )
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, err[-6000:]
    assert err.splitlines()[-1] == (
        "Interrupted: stopped by Ctrl-C; the checkpoint of step 1 is saved; go on with "
        f"agentrl train --resume {run}"
    )


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def _assert_same_run(one: Path, two: Path) -> None:
    assert [untimed(a) for a in metrics_of(one)] == [untimed(b) for b in metrics_of(two)]
    for step in (1, 2, 3, 4):
        files = [run / "trajectories" / f"step_{step:06d}.jsonl" for run in (one, two)]
        first, second = (load_file(tokens_path(file)) for file in files)
        assert first.keys() == second.keys()
        for name in first:
            # What the trainer did not score is not a number.
            same = (first[name] == second[name]) | (first[name].isnan() & second[name].isnan())
            assert first[name].shape == second[name].shape and same.all(), (step, name)
    actors = [run / "checkpoints" / "step_000004" / "actor" for run in (one, two)]
    first, second = (load_full(actor) for actor in actors)
    assert first.keys() == second.keys()
    assert any(name.startswith("optimizer/exp_avg_sq/") for name in first)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert read_values(actors[0]) == read_values(actors[1])
    states = [read_state(actor.parent) for actor in actors]
    for part in ("progress", "rng", "versions"):
        assert states[0][part] == states[1][part], part


def test_every_trajectory_is_exact_to_the_token(whole_run: Path) -> None:
    """Mask, policy versions and text of everything that was sampled."""
    tokenizer = open_run_model(whole_run).tokenizer
    num_seen = num_equal = 0
    for step in (1, 2, 3, 4):
        path = whole_run / "trajectories" / f"step_{step:06d}.jsonl"
        for stored in iter_stored(path):
            _check_record(stored.trajectory, tokenizer, version=step - 1)
            num_seen += 1
            num_equal += stored.trajectory.drift == 0
    assert num_seen == 4 * 24
    # So little training writes a broken call now and then, which the template spells otherwise:
    # that is what drift counts. The others have to be equal to the letter.
    assert num_equal > num_seen / 2


def _check_record(trajectory: Trajectory, tokenizer: Any, *, version: int) -> None:
    assert not trajectory.failed, trajectory.error
    assert len(trajectory.segments) == 1
    segment = trajectory.segments[0]
    spans = np.zeros(len(segment), dtype=bool)
    for turn in trajectory.turns:
        spans[turn.start : turn.end] = True
    assert (segment.loss_mask == spans).all()
    assert (segment.policy_version[spans] == version).all()
    assert (segment.policy_version[~spans] == -1).all()
    assert (segment.logprobs[~spans] == 0).all() and (segment.logprobs[spans] <= 0).all()
    text = tokenizer.apply_chat_template(
        trajectory.messages, tools=_tools(), tokenize=False, add_generation_prompt=False
    )
    decoded = tokenizer.decode(segment.ids.tolist(), skip_special_tokens=False)
    # The record ends with the last answer: what the tool said after it is in no token.
    assert text.startswith(decoded) == (trajectory.drift == 0), (decoded, text)


def _tools() -> list[dict[str, Any]]:
    from agentrl.tool.binding import Toolbox

    return Toolbox(["python"]).schemas


def test_the_engines_logprobs_are_those_of_transformers(whole_run: Path) -> None:
    """The last evaluation was sampled by the weights of the last checkpoint."""
    loaded = open_run_model(whole_run)
    worst = 0.0
    evaluated = read_trajectories(whole_run / "eval" / "step_000004.jsonl")
    assert len(evaluated) == 24, "of both held-out splits"
    for trajectory in evaluated:
        for segment in trajectory.segments:
            ids = torch.from_numpy(segment.ids)[None]
            with torch.no_grad():
                logprobs = loaded.model(ids).logits[0, :-1].log_softmax(-1)
            recomputed = logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()
            mask = segment.loss_mask[1:]
            worst = max(worst, float(np.abs(recomputed - segment.logprobs[1:])[mask].max()))
    assert worst < 1e-4


def test_the_exported_policy_is_the_one_of_the_run(
    cache: Path, whole_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    shown = agentrl(cache, "export", str(whole_run), str(out))
    assert shown.splitlines()[-1].startswith(f"{out}: {whole_run} step ")
    assert "Writing model shards" not in shown
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = torch.tensor([tokenizer("Write f(x)")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(exported(ids).logits, open_run_model(whole_run).model(ids).logits)


def test_a_run_can_be_measured_and_its_report_opened(
    cache: Path, whole_run: Path, tmp_path: Path
) -> None:
    out = agentrl(cache, "eval", "--model", str(whole_run), "--tasks", "4", "-n", "2", "--json")
    measured = json.loads(out[out.index("{") : out.rindex("}") + 1])
    assert measured["env"] == "code_sandbox" and measured["model"] == str(whole_run)
    assert measured["split"] == "test" and measured["samples_per_task"] == 2
    whole = measured["results"][0]
    assert whole["stratum"] == "all" and whole["samples"] == 8
    assert whole["success"]["low"] <= whole["success"]["mean"] <= whole["success"]["high"]
    rolled = tmp_path / "rolled.jsonl"
    agentrl(cache, "rollout", "--model", str(whole_run), "--tasks", "2", "--out", str(rolled))
    assert len(read_trajectories(rolled)) == 2
    assert "code_sandbox" in (whole_run / "report.html").read_text()


def test_a_resume_with_other_settings_is_refused_by_name(cache: Path, whole_run: Path) -> None:
    before = (whole_run / "config.yaml").read_text()
    out = agentrl(cache, "train", "--resume", str(whole_run), "actor.lr=0.1", expect=2)
    assert "actor.lr was" in out and "force_resume" in out
    # The learning rate falls over the length of the run, so another length is another training.
    out = agentrl(cache, "train", "--resume", str(whole_run), "trainer.total_steps=9", expect=2)
    assert "trainer.total_steps was 4 and is now 9" in out
    assert (whole_run / "config.yaml").read_text() == before, "a refused resume changes nothing"


def test_a_finished_run_says_so(cache: Path, whole_run: Path) -> None:
    out = agentrl(cache, "train", "--resume", str(whole_run), expect=2)
    assert "has finished" in out and "trainer.total_steps" in out


def test_metrics_that_are_gone_are_told_when_a_run_goes_on(
    cache: Path, whole_run: Path, tmp_path: Path
) -> None:
    """A copy goes on where it is now, not where the run began."""
    copy = shutil.copytree(whole_run, tmp_path / "copy")
    before = (whole_run / "metrics.jsonl").read_text()
    (copy / "metrics.jsonl").write_text("")
    longer = ["trainer.total_steps=5", "trainer.force_resume=true"]
    out = agentrl(cache, "train", "--resume", str(copy), *longer)
    assert f"{copy / 'metrics.jsonl'} has no lines of 5 of the steps 0 to 4 (0, 1, 2, 3, 4)" in out
    assert [line["step"] for line in metrics_of(copy)] == [5]
    assert (whole_run / "metrics.jsonl").read_text() == before


def test_learning_rate_zero_changes_nothing(cache: Path, tmp_path: Path) -> None:
    lines = train(
        cache,
        tmp_path / "run",
        "guess_number",
        "actor.lr=0",
        "trainer.total_steps=2",
        "trainer.eval_every=1",
    )
    successes = {json.dumps(_evaluation(line)) for line in lines}
    assert len(successes) == 1
    assert all(line["actor/grad_norm"] > 0 for line in lines[1:]), "there was a gradient to ignore"


def _evaluation(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key.startswith("val/")}


def test_an_environment_that_misbehaves_costs_its_own_trajectories(
    cache: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    lines = train(
        cache,
        run,
        f"{HERE / 'flaky_env.py'}:Flaky",
        "trainer.total_steps=2",
        "trainer.prompts_per_step=1",
        "rollout.max_turns=2",
        "rollout.reward_timeout_s=1",
        "env.step_timeout_s=1",
        "failure.policy=mask",
    )
    assert [line["step"] for line in lines] == [0, 1, 2], "the steps went on"
    ended = {}
    for step in (1, 2):
        for trajectory in read_trajectories(run / "trajectories" / f"step_{step:06d}.jsonl"):
            kind = trajectory.task.data["kind"]
            ended.setdefault(kind, set()).add(str(trajectory.stop_reason))
            assert trajectory.failed == (kind != "good")
            assert trajectory.score is None or kind == "good"
    expected = {
        "good": {"terminated"},
        "raises": {"env_error"},
        "hangs": {"env_timeout"},
        "wrong_type": {"env_error"},
        "nan_reward": {"reward_error"},
        "late_reward": {"reward_error"},
        "bad_score": {"reward_error"},
    }
    assert ended == {kind: expected[kind] for kind in ended}
    assert len(ended) >= 3, "the seed met too few kinds of task"
    total = sum(line.get("trajectories/failed", 0) for line in lines)
    assert total > 0


@pytest.fixture(autouse=True)
def _no_stray_processes() -> Iterator[None]:
    """Every run ends its own children."""
    yield
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    strays = [line for line in listing.stdout.splitlines() if "flaky_env.py:Flaky" in line]
    assert not strays
