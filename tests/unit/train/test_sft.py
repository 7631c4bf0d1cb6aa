from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from agentrl.agent.renderer import Renderer
from agentrl.algo.loss import SupervisedLoss
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.errors import TrainingError
from agentrl.model.tiny import build_tiny, tiny_config
from agentrl.testing import make_tokenizer
from agentrl.train.sft import SFTStep, evaluate_loss, run_sft
from agentrl.train.sft_config import SFTConfig
from agentrl.train.sft_data import ChatExample, EncodedExample, encode_examples, to_batch

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


def test_a_training_of_which_every_step_was_skipped_is_no_success() -> None:
    config = SFTConfig(steps=2, episodes_per_step=4, warmup_steps=0)
    engine = _engine(config)
    with torch.no_grad():
        engine.model.model.norm.weight.fill_(math.nan)
    with pytest.raises(TrainingError, match="2 steps in a row, up to step 2 of 2.*lr"):
        run_sft(config, engine, _examples(8, seed=0))


def test_the_loss_of_a_step_is_the_mean_over_its_learned_tokens() -> None:
    config = SFTConfig(lr=0.0, steps=1, episodes_per_step=5, warmup_steps=0)
    engine, examples = _engine(config), _examples(5, seed=4)
    total = count = 0.0
    with torch.no_grad():
        for example in examples:
            ids = torch.tensor([example.ids])
            logprobs = engine.model(input_ids=ids).logits[0].double().log_softmax(-1)
            for position in (p for p, learned in enumerate(example.loss_mask) if learned):
                total -= float(logprobs[position - 1, example.ids[position]])
                count += 1
    assert run_sft(config, engine, examples).losses[0] == pytest.approx(total / count, abs=1e-5)


def test_packing_changes_neither_loss_nor_gradient() -> None:
    """One row a pass, a few, all at once; rows apart by a factor of three."""
    examples = _examples(8, seed=5) + _examples(1, seed=6) * 2
    examples.append(EncodedExample(ids=examples[0].ids * 3, loss_mask=examples[0].loss_mask * 3))
    found = []
    for tokens in (1, 64, 100_000):
        config = SFTConfig(lr=1e-2, steps=2, episodes_per_step=11, tokens_per_micro_batch=tokens)
        engine = _engine(config)
        steps: list[SFTStep] = []
        run_sft(config, engine, examples, on_step=steps.append)
        weights = torch.cat([value.flatten() for _, value in engine.export_params()])
        found.append(([(s.loss, s.grad_norm) for s in steps], weights.clone()))
    for numbers, weights in found[1:]:
        for got, want in zip(numbers, found[0][0], strict=True):
            assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
        assert torch.allclose(weights, found[0][1], atol=2e-5)


def test_a_gradient_is_the_same_packed_and_alone() -> None:
    examples = _examples(6, seed=8)
    gradients = []
    for tokens in (1, 100_000):
        config = SFTConfig(lr=1e-3, betas=(0.0, 0.9), tokens_per_micro_batch=tokens)
        engine = _engine(config)
        engine.train_mini_batch(to_batch(examples), SupervisedLoss(), tokens_per_micro_batch=tokens)
        assert engine._optimizer is not None
        moments = [state["exp_avg"].flatten() for state in engine._optimizer.state.values()]
        gradients.append(torch.cat(moments))  # with beta1 = 0 the first moment is the gradient
    assert torch.allclose(gradients[0], gradients[1], atol=1e-6)


def test_nothing_is_learned_at_rate_0_and_something_at_another() -> None:
    losses = {}
    for lr in (0.0, 3e-3):
        config = SFTConfig(lr=lr, steps=40, episodes_per_step=16, warmup_steps=5, eval_every=10)
        steps: list[SFTStep] = []
        run_sft(
            config,
            _engine(config),
            _examples(100, seed=0),
            validation=_examples(10, seed=1),
            on_step=steps.append,
        )
        measured = {s.step: s.validation_loss for s in steps if s.validation_loss is not None}
        assert list(measured) == [10, 20, 30, 40]
        losses[lr] = list(measured.values())
    assert losses[0.0] == [losses[0.0][0]] * 4
    assert losses[3e-3] == sorted(losses[3e-3], reverse=True)
    assert losses[3e-3][-1] < 0.7 * losses[0.0][0]


def test_epochs_decide_the_number_of_steps() -> None:
    config = SFTConfig(steps=3, epochs=2.5, episodes_per_step=4, warmup_steps=0)
    assert config.num_steps(10) == 7  # 25 examples, the last step a whole one
    steps: list[SFTStep] = []
    run_sft(config, _engine(config), _examples(10, seed=0), on_step=steps.append)
    assert len(steps) == 7
    assert steps[-1].epoch == pytest.approx(2.8)


def test_a_run_in_two_parts_sees_what_an_unbroken_one_does() -> None:
    config = SFTConfig(lr=1e-2, steps=6, episodes_per_step=4, warmup_steps=2, save_every=3)
    whole, saved_at = _engine(config), []
    want = run_sft(
        config, whole, _examples(9, seed=0), save=lambda step: saved_at.append(step.step)
    )
    parts = _engine(config)
    stopped = SFTConfig(lr=1e-2, steps=3, episodes_per_step=4, warmup_steps=2)
    first = run_sft(stopped, parts, _examples(9, seed=0))
    second = run_sft(config, parts, _examples(9, seed=0), first_step=4)
    assert saved_at == [3]  # the last step's state is exported, not saved
    assert [*first.losses, *second.losses] == want.losses


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes_per_step": 0}, "episodes_per_step=0"),
        ({"epochs": 0.0}, "epochs=0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"ranks": 2}, "add cluster=ray"),
        ({"cluster": "slurm"}, "write local or ray"),
        ({"cluster": "ray", "ranks": 4, "shard_size": 3}, "shard_size=3: must divide"),
    ],
)
def test_settings_that_cannot_work_are_named(changes: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in SFTConfig(**changes).problems())
    assert not list(SFTConfig().problems())
