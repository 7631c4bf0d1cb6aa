from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from agentrl.agent.renderer import Renderer
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.errors import TrainingError
from agentrl.model.tiny import build_tiny, tiny_config
from agentrl.testing import make_tokenizer
from agentrl.train.sft import SFTStep, evaluate_loss, run_sft
from agentrl.train.sft_config import SFTConfig
from agentrl.train.sft_data import ChatExample, EncodedExample, encode_examples

TOKENIZER = make_tokenizer()


def _examples(count: int, seed: int) -> list[EncodedExample]:
    """Two-turn talks whose answers follow from what was said."""
    rng = random.Random(seed)
    talks = []
    for _ in range(count):
        digit = rng.randrange(5)
        talks.append(
            ChatExample(
                messages=[
                    {"role": "user", "content": str(digit)},
                    {"role": "assistant", "content": str(digit + 1)},
                    {"role": "user", "content": "again"},
                    {"role": "assistant", "content": str(digit)},
                ]
            )
        )
    return encode_examples(Renderer(TOKENIZER), talks, max_tokens=200).examples


def _engine(config: SFTConfig) -> FSDPEngine:
    shape = tiny_config(
        len(TOKENIZER), hidden_size=32, num_layers=2, num_heads=2, head_dim=16, feed_forward_size=64
    )
    model = build_tiny(TOKENIZER, 0, shape)
    return FSDPEngine(
        model,
        TOKENIZER,
        config.engine_config(),
        total_updates=config.steps,
        ranks=Ranks.single("cpu"),
    )


CONFIG = SFTConfig(lr=3e-3, steps=200, episodes_per_step=16, warmup_steps=5)


def test_a_toy_conversation_is_learned_and_generalises_to_validation() -> None:
    seen: list[SFTStep] = []
    engine = _engine(CONFIG)
    validation = _examples(20, seed=1)
    before = evaluate_loss(CONFIG, engine, validation)
    result = run_sft(
        CONFIG, engine, _examples(200, seed=0), validation=validation, on_step=seen.append
    )
    assert before == pytest.approx(math.log(len(TOKENIZER)), rel=0.1)
    assert result.validation_loss is not None and result.validation_loss < 0.1
    assert result.losses[0] > 3 > result.losses[-1]
    assert [step.step for step in seen] == list(range(1, 201))
    assert [step.loss for step in seen] == result.losses
    assert seen[-1].lr < seen[5].lr <= CONFIG.lr  # the schedule ends with the run
    assert result.num_tokens > 200 * 16 * 10


def test_reruns_give_the_same_bits_and_another_seed_other_ones() -> None:
    def run(seed: int) -> tuple[list[float], list[torch.Tensor]]:
        config = SFTConfig(lr=1e-2, steps=5, episodes_per_step=8, seed=seed)
        engine = _engine(config)
        losses = run_sft(config, engine, _examples(50, seed=0)).losses
        return losses, [value.clone() for _, value in engine.export_params()]

    first, again, other = run(0), run(0), run(1)
    assert first[0] == again[0] != other[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))


def test_validation_loss_is_the_mean_over_assistant_tokens() -> None:
    engine, examples = _engine(CONFIG), _examples(7, seed=3)
    total = count = 0.0
    with torch.no_grad():
        for example in examples:
            logits = engine.model(input_ids=torch.tensor([example.ids])).logits[0].double()
            for position in range(1, len(example.ids)):
                if example.loss_mask[position]:
                    logprobs = logits[position - 1].log_softmax(-1)
                    total -= float(logprobs[example.ids[position]])
                    count += 1
    assert evaluate_loss(CONFIG, engine, examples) == pytest.approx(total / count, abs=1e-5)


def test_gradients_that_stay_broken_stop_the_training() -> None:
    engine = _engine(CONFIG)
    weight: Any = engine.model.model.norm.weight
    with torch.no_grad():
        weight.fill_(math.nan)
    with pytest.raises(TrainingError, match="step 3 of 200.*lr"):
        run_sft(CONFIG, engine, _examples(20, seed=0))
    assert engine.num_skipped == 3
