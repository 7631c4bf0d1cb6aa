"""The training engine and the sampling engine hold one policy, before and after updates."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.loss import PolicyLoss
from agentrl.algo.policy_losses import Vanilla
from agentrl.batch import Batch
from agentrl.dist.config import EngineConfig
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.dist.weight_sync.inproc import InprocWeightSync
from agentrl.rollout.engines.config import HFEngineConfig
from agentrl.rollout.engines.hf import HFEngine
from agentrl.types import GenerateRequest, SamplingParams

BUDGET = 256
SHAPE = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": None,
}


def _model(family: str, tied: bool) -> Qwen3ForCausalLM | LlamaForCausalLM:
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied))


async def _sample(engine: HFEngine, step: int, temperature: float) -> Batch:
    async def one(index: int) -> tuple[list[int], int, list[float]]:
        prompt = [3 + (7 * index + step + i) % 100 for i in range(4 + index % 5)]
        sampling = SamplingParams(max_tokens=12, temperature=temperature, seed=100 * step + index)
        request = GenerateRequest(
            prompt_ids=prompt, sampling=sampling, session_id=f"{step}-{index}"
        )
        out = await engine.generate(request)
        return [*prompt, *out.ids], len(prompt), out.logprobs

    rows = await asyncio.gather(*(one(index) for index in range(16)))
    batch = Batch.from_rows(
        {
            "ids": [torch.tensor(ids) for ids, _, _ in rows],
            "loss_mask": [torch.arange(len(ids)) >= start for ids, start, _ in rows],
            "logprobs": [torch.tensor([0.0] * start + got) for _, start, got in rows],
            "advantages": [
                torch.full((len(ids),), (-1.0) ** i) for i, (ids, _, _) in enumerate(rows)
            ],
        }
    )
    mask, session = batch.tokens["loss_mask"], batch.row_of_token
    totals = denominators(mask, session)
    batch.tokens["loss_weights"] = token_weights(mask, session, None, "token-mean", totals)
    batch.tokens["old_logprobs"] = batch.tokens["logprobs"]
    return batch


def _loss(batch: Batch) -> PolicyLoss:
    num_tokens = int(batch.tokens["loss_mask"].sum())
    return PolicyLoss(token_loss=Vanilla(), num_tokens=num_tokens)


def _train(trainer: FSDPEngine, batch: Batch) -> dict[str, Any]:
    return trainer.train_mini_batch(
        batch, _loss(batch), tokens_per_micro_batch=BUDGET, keep=("logprobs",)
    )


def _largest_difference(batch: Batch, metrics: dict[str, Any]) -> float:
    """Of the engine's from the trainer's log-probabilities in the pass that trained."""
    distance = metrics["logprobs/tokens"] - batch.tokens["logprobs"]
    return float(distance[batch.tokens["loss_mask"]].abs().max())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", False)])
def test_logprobs_of_sampler_and_trainer_agree_after_every_update(
    family: str, tied: bool, temperature: float
) -> None:
    async def scenario() -> None:
        model = _model(family, tied)
        trainer = FSDPEngine(
            model, None, EngineConfig(lr=1e-2), temperature=temperature, ranks=Ranks.single("cpu")
        )
        engine = HFEngine(copy.deepcopy(model), HFEngineConfig(num_slots=8, max_context=64))
        await engine.start()
        try:
            for step in range(3):
                published = await InprocWeightSync().publish(trainer, engine, step)
                assert published["weight_sync/checksum_ok"] == 1.0
                batch = await _sample(engine, step, temperature)
                scores = trainer.infer_batch(batch, tokens_per_micro_batch=BUDGET)
                again = scores["logprobs"]
                torch.testing.assert_close(again, batch.tokens["logprobs"], atol=1e-4, rtol=0)
                metrics = _train(trainer, batch)
                assert _largest_difference(batch, metrics) < 1e-4
                assert metrics["pg_clipfrac"] == 0 and metrics["kl"] < 1e-6
            # Without a sync the engine is behind, and the measure says so.
            stale = await _sample(engine, 9, temperature)
            assert _largest_difference(stale, _train(trainer, stale)) > 1e-3
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))
