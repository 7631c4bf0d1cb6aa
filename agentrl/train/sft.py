"""Supervised training on conversations: loss on what assistants said, nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from agentrl.algo.loss import SupervisedLoss
from agentrl.dist.engine import TrainEngine
from agentrl.errors import Preempted, TrainingError
from agentrl.train.interruption import end_if_cancelled
from agentrl.train.sft_config import SFTConfig
from agentrl.train.sft_data import EncodedExample, endless, to_batch

SAME_COMMAND = "the same command and --resume"
_MAX_SKIPPED_IN_A_ROW = 3


@dataclass(slots=True, frozen=True, kw_only=True)
class SFTStep:
    """One optimizer step, for progress displays and metrics."""

    step: int
    total_steps: int
    loss: float
    """Mean negative log-probability of learned tokens, nats."""
    lr: float
    grad_norm: float
    epoch: float
    """Passes over the examples so far."""
    num_tokens: int
    """Fed in this step, context included."""
    seconds: float
    validation_loss: float | None = None
    """Of the validation examples after this step, where it was measured."""

    def metrics(self) -> dict[str, float]:
        """Return them under the names of ``metrics.jsonl``."""
        found = {
            "sft/loss": self.loss,
            "sft/lr": self.lr,
            "sft/grad_norm": self.grad_norm,
            "sft/epoch": self.epoch,
            "sft/tokens": self.num_tokens,
            "timing_s/step": self.seconds,
            "throughput/train_tokens_per_s": self.num_tokens / max(self.seconds, 1e-9),
        }
        if self.validation_loss is not None:
            found["sft/validation_loss"] = self.validation_loss
        return found


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
    first_step: int = 1,
    on_step: Callable[[SFTStep], None] | None = None,
    save: Callable[[SFTStep], None] | None = None,
    stop_reason: Callable[[], str] = str,
) -> SFTResult:
    """Train steps of ``config.episodes_per_step`` examples.

    Examples are drawn without replacement, pass after pass, in an order that the seed decides.

    Args:
        engine: built with ``config`` as its optimizer settings, ``total_updates`` the number of
            steps, and temperature 1.
        validation: measured every ``config.eval_every`` steps, and after the last one.
        first_step: above 1 where a run is resumed.
        save: called every ``config.save_every`` steps, but for the last, and where the training is
            stopped.
        stop_reason: what asks to stop after the step that has begun; empty: nothing does.

    Raises:
        TrainingError: the gradient was not finite several times in a row.
        Preempted: ``stop_reason`` gave one before the last step.
    """
    start = time.perf_counter()
    total = config.num_steps(len(examples))
    per_step = config.episodes_per_step
    stream = endless(examples, seed=config.seed, start=(first_step - 1) * per_step)
    losses: list[float] = []
    validation_loss: float | None = None
    num_tokens = skipped_in_a_row = 0
    for step in range(first_step, total + 1):
        begin = time.perf_counter()
        batch = to_batch(list(islice(stream, per_step)))
        metrics = engine.train_mini_batch(
            batch, SupervisedLoss(), tokens_per_micro_batch=config.tokens_per_micro_batch
        )
        seconds = time.perf_counter() - begin
        losses.append(metrics["loss"])
        num_tokens += batch.num_tokens
        skipped_in_a_row = skipped_in_a_row + 1 if metrics.get("skipped") else 0
        if skipped_in_a_row == min(_MAX_SKIPPED_IN_A_ROW, total):
            raise TrainingError(
                f"the gradient was not finite in {skipped_in_a_row} steps in a row, up to step "
                f"{step} of {total}: lower lr (now {config.lr}) or grad_clip"
            )
        measures = validation and (step == total or _is_due(step, config.eval_every))
        validation_loss = evaluate_loss(config, engine, validation) if measures else None
        done = SFTStep(
            step=step,
            total_steps=total,
            loss=metrics["loss"],
            lr=metrics["lr"],
            grad_norm=metrics["grad_norm"],
            epoch=step * per_step / len(examples),
            num_tokens=batch.num_tokens,
            seconds=seconds,
            validation_loss=validation_loss,
        )
        if on_step is not None:
            on_step(done)
        if step < total:
            end_if_cancelled()
        reason = stop_reason() if step < total else ""
        if save is not None and step < total and (reason or _is_due(step, config.save_every)):
            save(done)
        if reason:
            raise Preempted(
                f"stopped by {reason} after step {step} of {total}; go on with {SAME_COMMAND}"
            )
    return SFTResult(
        losses=losses,
        validation_loss=validation_loss,
        num_tokens=num_tokens,
        seconds=time.perf_counter() - start,
    )


def evaluate_loss(
    config: SFTConfig, engine: TrainEngine, examples: Sequence[EncodedExample]
) -> float:
    """Return the mean negative log-probability of learned tokens, in nats."""
    batch = to_batch(examples)
    logprobs = engine.infer_batch(batch, tokens_per_micro_batch=config.tokens_per_micro_batch)[
        "logprobs"
    ]
    return -float((logprobs.double() * batch.tokens["loss_weights"].double()).sum())


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
