"""Runs with a critic: what moves, what is left alone, and how one is resumed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config.load import load
from agentrl.launch import open_trainer
from agentrl.resuming import resumed_config
from agentrl.telemetry.run_dir import RunDir
from agentrl.train.trainer import Trainer

SMALL = [
    "env.id=guess_number",
    "env.kwargs.turn_reward=1",
    "algo=ppo",
    "model.warm_start.steps=30",
    "model.warm_start.episodes_per_step=16",
    "trainer.prompts_per_step=16",
    "trainer.save_every=2",
    "trainer.num_threads=1",
    "rollout.n=1",
    "eval.val_tasks=2",
    "eval.test_tasks=2",
    "telemetry={trackers: [], report: false, quiet: true}",
]

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module", autouse=True)
def shared_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One warm start for all runs; the number of threads is as before afterwards."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(num_threads)


def weights(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    return {
        role: {name: value.clone() for name, value in engine.export_params()}
        for role, engine in trainer.engines.items()
    }


def train(path: Path, *overrides: str, resume: bool = False) -> list[dict[str, Any]]:
    """Run to the end; returns the metrics of the steps, with the weights at start and end."""

    async def run() -> list[dict[str, Any]]:
        config = (
            resumed_config(str(path), overrides)
            if resume
            else load([*SMALL, f"trainer.run_dir={path}", *overrides])
        )
        async with open_trainer(config) as trainer, asyncio.timeout(150):
            before = weights(trainer)
            await trainer.fit()
            after = weights(trainer)
        lines = [json.loads(line) for line in RunDir(path).metrics_path.open()][1:]
        return [line | {"before": before, "after": after} for line in lines]

    return asyncio.run(run())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def curves(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    own = ("actor/", "critic/", "credit/", "reward/")
    return [{k: v for k, v in line.items() if k.startswith(own)} for line in lines]


def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(tmp_path: Path) -> None:
    settings = ["critic.head_start_steps=1", "actor.schedule=constant"]
    whole = train(tmp_path / "whole", "trainer.total_steps=4", *settings)
    train(tmp_path / "halves", "trainer.total_steps=2", *settings)
    halves = train(tmp_path / "halves", "trainer.total_steps=4", resume=True)
    assert curves(halves) == curves(whole) and len(whole) == 4
    for role in ("actor", "critic"):
        assert same(halves[-1]["after"][role], whole[-1]["after"][role])
    assert [line.get("critic/head_start", 0) for line in whole] == [1, 0, 0, 0]
    assert [line["actor/updates"] for line in whole] == [0, 2, 2, 2]
    assert [line["critic/updates"] for line in whole] == [8] * 4


def test_with_a_rate_of_0_only_the_critic_moves_and_both_are_saved(tmp_path: Path) -> None:
    lines = train(tmp_path / "run", "trainer.total_steps=2", "actor.lr=0")
    before, after = lines[0]["before"], lines[0]["after"]
    assert same(before["actor"], after["actor"]) and not same(before["critic"], after["critic"])
    assert lines[0]["critic/explained_variance"] == 0, "a new value head says 0 of every state"
    assert lines[1]["critic/explained_variance"] != 0
    saved = sorted(os.listdir(RunDir(tmp_path / "run").checkpoints_path / "step_000002"))
    assert {"actor", "critic"} <= set(saved)


def test_the_critic_starts_as_the_policy_with_a_head_that_says_0(tmp_path: Path) -> None:
    lines = train(tmp_path / "run", "trainer.total_steps=1", "critic.lr=0", "actor.lr=0")
    actor, critic = lines[0]["after"]["actor"], lines[0]["after"]["critic"]
    heads = {name for name in critic if name.startswith("value_head.")}
    assert heads and not any(critic[name].any() for name in heads)
    trunk = critic.keys() - heads
    assert trunk <= actor.keys() and all(torch.equal(actor[n], critic[n]) for n in trunk)
    # Without values, with one step of reward to come, the loss is half the mean squared target.
    assert lines[0]["critic/explained_variance"] == 0 and lines[0]["critic/loss"] > 0
