"""Runs that train adapters: what moves, what they reach, how they are resumed and exported."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.cli.export import command as export
from agentrl.config.load import load
from agentrl.dist.lora import is_adapter
from agentrl.dist.sharded_state import stored_tensors
from agentrl.errors import CheckpointError
from agentrl.launch import open_trainer
from agentrl.resuming import resumed_config
from agentrl.telemetry.run_dir import RunDir

SETTINGS = [
    "env.id=guess_number",
    "model.warm_start.steps=150",
    "lora.rank=16",
    "actor.lr=2e-3",
    "actor.schedule=constant",
    "algo.kl.coef=1e-3",
    "trainer.total_steps=6",
    "trainer.save_every=3",
    "trainer.num_threads=1",
    "eval.val_tasks=2",
    "eval.test_tasks=2",
    "telemetry={trackers: [], report: false, quiet: true}",
]
pytestmark = pytest.mark.timeout(200)


def train(path: Path, *overrides: str, resume: bool = False) -> list[dict[str, Any]]:
    """Run to the end; returns the metrics of the steps."""

    async def run() -> None:
        config = (
            resumed_config(str(path), overrides)
            if resume
            else load([*SETTINGS, f"trainer.run_dir={path}", *overrides])
        )
        async with open_trainer(config) as trainer, asyncio.timeout(180):
            await trainer.fit()

    asyncio.run(run())
    return [json.loads(line) for line in RunDir(path).metrics_path.open()][1:]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """A run of six steps, and its metrics."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("lora") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_CACHE", str(path.parent / "cache"))
        yield path, train(path)
    torch.set_num_threads(num_threads)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None]).logits


def test_adapters_alone_are_trained_and_they_learn(whole) -> None:
    path, lines = whole
    [start] = (path.parent / "cache").glob("warm_start/*/model.safetensors")
    beneath, before = load_file(path / "model" / "model.safetensors"), load_file(start)
    assert all(torch.equal(beneath[name], before[name]) for name in before)
    names = stored_tensors(path / "checkpoints" / "step_000006" / "actor")
    assert len(names) == 3 * 2 * 7 * 2 and all(is_adapter(name) for name in names)
    success = [line["success/mean"] for line in lines]
    assert sum(success[-4:]) / 4 > success[0] + 0.05, success
    # The reference is the actor without its adapters, which add nothing before the first update.
    assert lines[0]["actor/ref_kl"] < lines[-1]["actor/ref_kl"]
    assert not (path / "reference").exists()


def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(whole, tmp_path: Path) -> None:
    path, lines = whole
    train(tmp_path / "halves", "trainer.total_steps=3")
    halves = train(tmp_path / "halves", "trainer.total_steps=6", resume=True)
    own = ("actor/", "credit/", "reward/", "success/")
    for line, other in zip(lines, halves, strict=True):
        assert {k: v for k, v in line.items() if k.startswith(own)} == {
            k: v for k, v in other.items() if k.startswith(own)
        }
    last = Path("checkpoints", "step_000006", "actor", "shard_00000.safetensors")
    one, other = load_file(path / last), load_file(tmp_path / "halves" / last)
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_the_export_is_merged_and_computes_what_the_adapters_do(whole, tmp_path: Path) -> None:
    path, _ = whole
    for out, *options in (["merged"], ["adapters", "--adapters"]):
        CliRunner().invoke(
            export, [str(path), str(tmp_path / out), *options], catch_exceptions=False
        )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32)
    start = logits(base)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapters"))
    assert float((logits(merged) - logits(adapted)).abs().max()) < 1e-4
    assert float((logits(merged) - start).abs().max()) > 1e-2


def test_a_run_whose_frozen_weights_have_changed_is_not_resumed(whole, tmp_path: Path) -> None:
    train(tmp_path / "run", "trainer.total_steps=1")
    weights = tmp_path / "run" / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="damaged: model.safetensors changed.*lora.rank"):
        train(tmp_path / "run", "trainer.total_steps=2", resume=True)
