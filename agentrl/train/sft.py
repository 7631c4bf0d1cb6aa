"""Supervised training on conversations: loss on what assistants said, nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from agentrl.algo.loss import SupervisedLoss
from agentrl.dist.engine import TrainEngine
from agentrl.errors import TrainingError
from agentrl.train.sft_config import SFTConfig
from agentrl.train.sft_data import EncodedExample, endless, to_batch

_MAX_SKIPPED_IN_A_ROW = 3


@dataclass(slots=True, frozen=True, kw_only=True)
class SFTStep:
    """One optimizer step, for progress displays."""

    step: int
    total_steps: int
    loss: float
    """Mean negative log-probability of assistant tokens, nats."""
    lr: float
    grad_norm: float


@dataclass(slots=True, frozen=True, kw_only=True)
class SFTResult:
    """What supervised training came to."""

    losses: list[float]
    """Of every step."""
    validation_loss: float | None
    """Of the validation examples after the last step; None where there are none."""
    num_tokens: int
    """Tokens fed, context included."""
    seconds: float


def run_sft(
    config: SFTConfig,
    engine: TrainEngine,
    examples: Sequence[EncodedExample],
    *,
    validation: Sequence[EncodedExample] = (),
    on_step: Callable[[SFTStep], None] | None = None,
) -> SFTResult:
    """Train ``config.steps`` steps of ``config.episodes_per_step`` examples.

    Examples are drawn without replacement, pass after pass, in an order that the seed decides.

    Args:
        engine: built with ``config`` as its optimizer settings, ``total_updates=config.steps``
            and temperature 1.

    Raises:
        TrainingError: the gradient was not finite several times in a row.
    """
    start = time.perf_counter()
    stream = endless(examples, seed=config.seed)
    losses: list[float] = []
    num_tokens = skipped_in_a_row = 0
    for step in range(1, config.steps + 1):
        batch = to_batch(list(islice(stream, config.episodes_per_step)))
        metrics = engine.train_mini_batch(
            batch, SupervisedLoss(), tokens_per_micro_batch=config.tokens_per_micro_batch
        )
        losses.append(metrics["loss"])
        num_tokens += batch.num_tokens
        skipped_in_a_row = skipped_in_a_row + 1 if metrics.get("skipped") else 0
        if skipped_in_a_row == _MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"the gradient was not finite in {skipped_in_a_row} steps in a row, up to step "
                f"{step} of {config.steps}: lower lr (now {config.lr}) or grad_clip"
            )
        if on_step is not None:
            on_step(
                SFTStep(
                    step=step,
                    total_steps=config.steps,
                    loss=metrics["loss"],
                    lr=metrics["lr"],
                    grad_norm=metrics["grad_norm"],
                )
            )
    return SFTResult(
        losses=losses,
        validation_loss=evaluate_loss(config, engine, validation) if validation else None,
        num_tokens=num_tokens,
        seconds=time.perf_counter() - start,
    )


def evaluate_loss(
    config: SFTConfig, engine: TrainEngine, examples: Sequence[EncodedExample]
) -> float:
    """Return the mean negative log-probability of assistant tokens, in nats."""
    batch = to_batch(examples)
    logprobs = engine.infer_batch(batch, tokens_per_micro_batch=config.tokens_per_micro_batch)[
        "logprobs"
    ]
    return -float((logprobs.double() * batch.tokens["loss_weights"].double()).sum())
