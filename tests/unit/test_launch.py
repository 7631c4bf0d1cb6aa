"""What a start refuses before a model is made, and what a resume says."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from agentrl.config.load import load
from agentrl.config.schema import Config
from agentrl.dist.export import save_pretrained
from agentrl.errors import AgentRLError, EngineError
from agentrl.launch import open_trainer, tracker_choices
from agentrl.model.tiny import build_tiny, tiny_config
from agentrl.testing import EchoEnv, make_tokenizer
from agentrl.train.config import TelemetryConfig
from agentrl.types import Task

NEVER = threading.Event()
SOUND = f"env.id='{__name__}:Sound'"


class Sound(EchoEnv):
    def tasks(self, split: str) -> list[Task]:
        return [Task(id=f"{split}-{i}", data={"word": f"{split}{i}"}) for i in range(4)]


class Hanging(Sound):
    def tasks(self, split: str) -> list[Task]:
        if split == "val":
            NEVER.wait()
        return super().tasks(split)


def refusal(config: Config) -> str:
    async def start() -> None:
        async with open_trainer(config):
            pytest.fail("it started")

    with pytest.raises(AgentRLError) as caught:
        asyncio.run(start())
    return str(caught.value)


def test_a_run_that_names_a_tracker_of_every_run_stays_quiet() -> None:
    chosen = tracker_choices(TelemetryConfig(trackers=["rich", "tensorboard"], quiet=True))
    assert chosen == {"jsonl": {}, "rich": {"quiet": True}, "tensorboard": {}}


def test_tasks_that_never_come_end_the_start(tmp_path: Path) -> None:
    run = tmp_path / "run"
    message = refusal(
        load(
            [
                f"env.id='{__name__}:Hanging'",
                "env.tasks_timeout_s=0.1",
                f"trainer.run_dir={run}",
            ]
        )
    )
    NEVER.set()
    assert f"environment '{__name__}:Hanging': tasks('val') did not return within 0.1 s" in message
    assert "env.tasks_timeout_s" in message
    assert not run.exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tools.specs.pythn=./mine.yaml", "env.kwargs.tools=[python]"], "did you mean 'python'"),
        (
            ["algo.reward_weights.style=1"],
            "algo.reward_weights.style=1.0: no part of the reward has that name",
        ),
        (["rollout=openai"], "rollout=openai: its server takes no weights, so it can only"),
        (
            ["model.path=tiny", "rollout.max_context_tokens=4096"],
            "'tiny' has 1024 positions, and rollout.max_context_tokens=4096 with the prompt takes "
            "more; these settings work together: rollout.max_context_tokens=1024 ",
        ),
    ],
)
def test_what_an_environment_or_model_cannot_give_is_refused_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    assert message in refusal(load([SOUND, f"trainer.run_dir={run}", *overrides]))
    assert not (tmp_path / "cache").exists() and not run.exists()


def test_a_folder_that_cannot_be_written_is_refused_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    config = load([SOUND, f"trainer.resume={run}"])
    assert "checkpoints' cannot be written" in refusal(config)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("log", [None, "engine.log"])
def test_a_start_that_fails_late_can_be_tried_again_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str | None
) -> None:
    def lost(*_: object) -> None:
        assert {"memory_plan.json", "reference"} <= {path.name for path in run.iterdir()}
        if log is not None:
            (run / log).write_text("why it failed")
        raise EngineError("the engine is gone")

    tokenizer, run = make_tokenizer(), tmp_path / "run"
    shape = tiny_config(len(tokenizer), hidden_size=32, num_layers=1, num_heads=1, head_dim=16)
    save_pretrained(build_tiny(tokenizer, 0, shape), tokenizer, tmp_path / "model", None)
    monkeypatch.setattr("agentrl.launch.open_engines", lost)
    settings = [f"model.path={tmp_path / 'model'}", "algo.kl.coef=0.1", f"trainer.run_dir={run}"]
    short = ["rollout.max_context_tokens=512", "rollout.max_response_tokens=256"]
    assert refusal(load([SOUND, *settings, *short])) == "the engine is gone"
    left = {path.name for path in run.iterdir()} - {".lock"} if run.exists() else set()
    assert left == ({log} if log else set())
