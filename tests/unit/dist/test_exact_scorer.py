"""The trainer in the operations of the rollout engine: equal bits, before and after updates."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from agentrl.algo.aggregate import denominators, token_weights
from agentrl.algo.loss import PolicyLoss
from agentrl.algo.policy_losses import Vanilla
from agentrl.batch import Batch
from agentrl.dist.config import EngineConfig
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.exact_scorer import ExactScorer
from agentrl.dist.ranks import Ranks
from agentrl.errors import ModelError
from agentrl.rollout.engines.config import HFEngineConfig
from agentrl.rollout.engines.hf import HFEngine
from agentrl.testing.random_models import VOCAB, build
from agentrl.types import GenerateRequest, SamplingParams

SHAPES = HFEngineConfig(num_slots=8, max_context=96, prefill_tokens=64)
BUDGET = 4096


async def play(engine: HFEngine, *, temperature: float, seed: int) -> Batch:
    """Sample 11 sessions of three turns, more than there are slots, with context in between."""
    generator = torch.Generator().manual_seed(seed)

    def context(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    async def session(index: int, prompt: list[int], between: list[list[int]]) -> list[list[Any]]:
        ids, mask, logprobs = [*prompt], [False] * len(prompt), [0.0] * len(prompt)
        for turn, observed in enumerate(between):
            sampling = SamplingParams(
                max_tokens=3 + (index + turn) % 9,
                temperature=temperature,
                seed=100 * seed + 10 * index + turn,
            )
            request = GenerateRequest(prompt_ids=ids, sampling=sampling, session_id=f"{index}")
            got = await engine.generate(request)
            ids = [*ids, *got.ids, *observed]
            mask += [True] * len(got.ids) + [False] * len(observed)
            logprobs += [*got.logprobs, *[0.0] * len(observed)]
        await engine.end_session(f"{index}")
        return [ids, mask, logprobs]

    plans = [(context(2 + 3 * i), [context(1 + i % 4) for _ in range(3)]) for i in range(11)]
    rows = await asyncio.gather(*(session(i, *plan) for i, plan in enumerate(plans)))
    names = ("ids", "loss_mask", "logprobs")
    columns = zip(names, zip(*rows, strict=True), strict=True)
    return Batch.from_rows({name: [torch.tensor(row) for row in rows] for name, rows in columns})


def with_loss(batch: Batch) -> PolicyLoss:
    mask, session = batch.tokens["loss_mask"], batch.row_of_token
    totals = denominators(mask, session)
    batch.tokens["advantages"] = torch.where(session % 2 == 0, 1.0, -1.0)
    batch.tokens["old_logprobs"] = batch.tokens["logprobs"]
    batch.tokens["loss_weights"] = token_weights(mask, session, None, "token-mean", totals)
    return PolicyLoss(token_loss=Vanilla(), num_tokens=totals.num_tokens)


def weights(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize(("family", "temperature"), [("qwen3", 1), ("llama", 0.6), ("qwen2", 1)])
def test_the_mismatch_is_exactly_zero_in_every_update(family: str, temperature: float) -> None:
    async def scenario() -> None:
        model = build(family)
        trainer = FSDPEngine(
            model,
            None,
            EngineConfig(lr=1e-2),
            ranks=Ranks.single("cpu"),
            temperature=temperature,
            exact=SHAPES,
        )
        engine = HFEngine(copy.deepcopy(model), SHAPES)
        await engine.start()
        try:
            for step in range(3):
                await engine.update_weights(trainer.export_params(), step)
                batch = await play(engine, temperature=temperature, seed=step)
                mask = batch.tokens["loss_mask"]
                for budget in (BUDGET, 40):  # however the batch is cut
                    scored = trainer.infer_batch(batch, tokens_per_micro_batch=budget)["logprobs"]
                    assert torch.equal(scored[mask], batch.tokens["logprobs"][mask])
                before = weights(model)
                found = trainer.train_mini_batch(
                    batch, with_loss(batch), tokens_per_micro_batch=BUDGET, keep=("logprobs",)
                )
                assert torch.equal(found["logprobs/tokens"][mask], batch.tokens["logprobs"][mask])
                assert found["ratio_max"] == 1.0 and found["kl"] == 0.0
                assert any(not torch.equal(before[n], p) for n, p in model.named_parameters())
            stale = await play(engine, temperature=temperature, seed=9)
            mask = stale.tokens["loss_mask"]
            scored = trainer.infer_batch(stale, tokens_per_micro_batch=BUDGET)["logprobs"]
            assert not torch.equal(scored[mask], stale.tokens["logprobs"][mask])
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_the_gradient_is_that_of_packed_rows() -> None:
    torch.manual_seed(0)
    ids = [torch.randint(0, VOCAB, (length,)) for length in (90, 17, 2, 40)]
    masks = [torch.arange(len(row)) > 0 for row in ids]
    batch = Batch.from_rows(
        {"ids": ids, "loss_mask": masks, "logprobs": [torch.full((len(r),), -3.0) for r in ids]}
    )
    moved = []
    for exact in (None, SHAPES):
        model = build("qwen3")
        before = weights(model)
        engine = FSDPEngine(
            model, None, EngineConfig(lr=1e-2, grad_clip=0), ranks=Ranks.single("cpu"), exact=exact
        )
        loss = with_loss(batch)
        metrics = engine.train_mini_batch(batch, loss, tokens_per_micro_batch=BUDGET)
        moved.append((metrics["grad_norm"], before, weights(model), metrics["entropy"]))
    assert moved[1][0] == pytest.approx(moved[0][0], rel=1e-4)
    assert moved[1][3] == pytest.approx(moved[0][3], rel=1e-5)
    for name, value in moved[0][2].items():
        torch.testing.assert_close(moved[1][2][name], value, atol=2e-3, rtol=0)


def test_what_has_no_exact_way_is_refused() -> None:
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=32,
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"rollout=hf cannot serve this model \(model type"):
        ExactScorer(Gemma3ForCausalLM(config), SHAPES)
    scorer = ExactScorer(build("llama"), SHAPES)
    long = Batch.from_rows(
        {"ids": [torch.zeros(97, dtype=torch.int64)], "loss_mask": [torch.arange(97) > 3]}
    )
    with pytest.raises(ModelError, match="97 tokens is longer than the context .* 96"):
        scorer(long, fields=("logprobs",))
    short = Batch.from_rows(
        {"ids": [torch.zeros(3, dtype=torch.int64)], "loss_mask": [torch.arange(3) > 0]}
    )
    with pytest.raises(ValueError, match="does not know"):
        scorer(short, fields=("values",))
