"""`agentrl bench`: real measurements of very little work."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from click.testing import CliRunner

from agentrl.bench.fixed_work import FixedWork
from agentrl.bench.machine import BenchError
from agentrl.bench.phases import OTHER, PHASES
from agentrl.bench.step import StepResult, refuse_other_work
from agentrl.bench.sync_arms import SyncSettings
from agentrl.cli.bench import command
from agentrl.errors import ConfigError

AHEAD = "ahead:rollout.max_staleness=1 algo.old_logprobs=recompute algo.correction.weight=token"
LITTLE = ["--prompts", "2", "--samples", "2", "--turn-tokens", "8", "--prompt-tokens", "40"]


def measured(*arguments: str, progress: list[str]) -> dict[str, Any]:
    """Measure, and see that standard error says what goes on: one line for each pattern."""
    result = CliRunner().invoke(command, [*arguments, "--threads", "1", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    lines = result.stderr.splitlines()
    for pattern in progress:
        assert any(re.fullmatch(pattern, line) for line in lines), (pattern, lines)
    return json.loads(result.stdout)


@pytest.mark.timeout(240)
def test_a_step_is_measured_by_phase_and_arm() -> None:
    arms = ["--arm", "one:rollout.n=2", "--arm", AHEAD]
    whole = measured(
        "step",
        *LITTLE,
        *arms,
        "--steps",
        "2",
        "--warmup",
        "1",
        "actor.lr=0.0",
        progress=["one: opened", "ahead: step 3 of 3 is trained"],
    )
    assert whole["machine"]["versions"]["torch"] and whole["ceilings"]["bytes_per_s"] > 0
    assert whole["asked"]["settings"] == ["actor.lr=0.0"]
    found = whole["found"]
    assert [arm["arm"] for arm in found["arms"]] == ["one", "ahead"]
    for arm in found["arms"]:
        assert arm["sampled_tokens"] == [32, 32]
        assert arm["context_tokens"] == [4 * 48] * 2
        assert len(arm["steps"]) == 2
        for step in arm["steps"]:
            assert step.keys() == {*PHASES, OTHER}
            assert step["update"] > 0 and step["sync"] > 0
    assert all(step["gen"] > 0 for step in found["arms"][0]["steps"])
    assert found["floor_s"].keys() == {"gen", "logp", "update", "sync"}


@pytest.mark.timeout(240)
def test_rollouts_do_the_same_work_under_every_schedule() -> None:
    whole = measured(
        "rollout", *LITTLE, "--turns", "2", "--latency-median-s", "0.001",
        "--latency-p99-s", "0.01", "--repeats", "2", "--batch", "2",
        progress=[rf"{name}: [0-9.]+ s, .* tokens/s" for name in ("batch", "barrier", "async")],
    )  # fmt: skip
    arms = {arm["name"]: arm for arm in whole["found"]["arms"]}
    assert arms.keys() == {"batch", "barrier", "async"}
    assert arms["batch"]["work"] == arms["barrier"]["work"] == arms["async"]["work"]
    assert [work["turns"] for work in arms["async"]["work"]] == [8, 8]
    assert whole["found"]["floor_s"] > 0


@pytest.mark.timeout(240)
def test_a_sync_is_measured_beside_its_floor() -> None:
    found = measured(
        "sync",
        "--shape",
        "tiny",
        "--arms",
        "shm",
        "--repeats",
        "2",
        progress=["shm: opened", r"floor: [0-9.]+ ms, warm-up", r"shm: [0-9.]+ ms"],
    )["found"]
    assert [arm["name"] for arm in found["arms"]] == ["floor", "shm"]
    assert all(len(arm["seconds"]) == 2 for arm in found["arms"])
    assert found["num_bytes"] > 100_000 and found["changed_share"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["step", "--shape", "huge"], "known are tiny"),
        (["step", "--arm", "nothing"], "NAME:KEY=VALUE"),
        (["step", "--arm", "a:x=1", "--arm", "a:x=2"], "names that differ"),
        (["sync", "--shape", "huge"], "known are tiny"),
        (["sync", "--shape", "tiny", "--arms", "pigeon"], "pigeon not possible here"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(command, [*arguments, "--threads", "1"])
    assert result.exit_code
    assert told in result.output + str(result.exception)


def test_time_without_an_owner_is_told() -> None:
    owned = dict.fromkeys(PHASES, 1.0)
    steps = [owned | {OTHER: 0.0}, owned | {OTHER: 2.0}]
    assert StepResult(arm="a", steps=steps).unowned == pytest.approx(2 / (2 + 2 * len(PHASES)))


def test_steps_of_other_work_are_refused() -> None:
    work = FixedWork(prompts=2, samples=2, turn_tokens=100)
    refuse_other_work(StepResult(arm="a", sampled_tokens=[400, 399]), work)
    with pytest.raises(BenchError, match="step 1 sampled 390 tokens, 400 were asked for"):
        refuse_other_work(StepResult(arm="a", sampled_tokens=[400, 390]), work)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("rollout --repeats 0", "--repeats"),
        ("rollout --batch 0", "--batch"),
        ("sync --repeats 0", "--repeats"),
        ("sync --bucket-mb 0", "--bucket-mb"),
        ("sync --threads -1", "--threads"),
        ("sync --threads 1000000", "--threads"),
        ("step --repeats 0", "--repeats"),
        ("step --steps 0", "--steps"),
        ("step --warmup -1", "--warmup"),
        ("step --arm a", "NAME:KEY=VALUE"),
        ("step --arm a:x=' ", "No closing quotation"),
    ],
)
def test_what_measures_nothing_is_refused(arguments: str, told: str) -> None:
    result = CliRunner().invoke(command, arguments.split(" "))
    assert result.exit_code == 2 and told in result.output


@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0])
def test_an_optimizer_that_cannot_step_is_refused(lr: float) -> None:
    with pytest.raises(ConfigError, match=f"--lr {lr}"):
        SyncSettings(lr=lr)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda: torch sees no GPU here"):
        SyncSettings(device="cuda")


def test_an_environment_says_no_less_than_nothing() -> None:
    with pytest.raises(ConfigError, match="answer_tokens=-1"):
        FixedWork(answer_tokens=-1)
