"""Whole runs that sample with vLLM's CPU build."""

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
from agentrl.telemetry.run_dir import RunDir

SOAK = bool(os.environ.get("AGENTRL_SOAK"))
# The recipe of the first run, and a part of it that learns in a minute.
LENGTH = (
    []
    if SOAK
    else [
        "model.warm_start.steps=400",
        "trainer.total_steps=6",
        "trainer.prompts_per_step=12",
        "eval.val_tasks=1",  # 0 would be all of them
        "eval.test_tasks=1",
        "trainer.eval_every=0",
    ]
)
SETTINGS = [
    "env.id=code_sandbox",
    "telemetry={trackers: [], report: false, quiet: true}",
    *LENGTH,
]
pytestmark = pytest.mark.timeout(3600 if SOAK else 900)


def train(path: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run to the end; returns the metrics of the steps."""

    async def run() -> None:
        config = load([*SETTINGS, f"trainer.run_dir={path}", *overrides])
        async with open_trainer(config) as trainer:
            await trainer.fit()

    asyncio.run(run())
    return [json.loads(line) for line in RunDir(path).metrics_path.open()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The same run on both engines, from one warm start."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_CACHE", str(folder / "cache"))
        yield {
            engine: train(folder / engine, f"rollout={engine}", "rollout.replicas_per_gpu=1")
            for engine in ("hf", "vllm")
        }
    torch.set_num_threads(num_threads)


def success(lines: list[dict[str, Any]]) -> list[float]:
    return [line["success/mean"] for line in lines[1:]]


def test_grpo_learns_on_vllm_as_it_does_on_transformers(
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    found = {engine: success(lines) for engine, lines in runs.items()}
    last = {engine: sum(values[-2:]) / 2 for engine, values in found.items()}
    for engine, values in found.items():
        assert last[engine] > values[0] + (0.3 if SOAK else 0.05), found
    assert abs(last["hf"] - last["vllm"]) < (0.05 if SOAK else 0.15), found
    for line in runs["vllm"][1:]:  # every step samples the weights that were trained
        assert line["weight_sync/checksum_ok"] == 1.0
        assert line["mismatch/logprob_abs_max"] < 1e-5
        assert line["staleness/max"] == 0
    # and answers later turns out of its cache
    assert min(line["serving/cache_hit_rate"] for line in runs["vllm"][1:]) > 0.3
