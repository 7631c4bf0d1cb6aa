"""The training engine: one process that holds the whole model.

Parameters, gradients and optimizer state live in one place; with several ranks the same engine
shards them, with the same results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.utils import logging

from agentrl.batch import Batch
from agentrl.dist.config import EngineConfig
from agentrl.dist.determinism import require_deterministic_kernels
from agentrl.dist.engine import LossFn, PendingSave
from agentrl.dist.inference import autocast, infer_batch
from agentrl.dist.micro_batch import micro_batches
from agentrl.dist.optimizer import build_adamw
from agentrl.dist.ranks import Ranks
from agentrl.dist.schedule import learning_rate
from agentrl.dist.scoring import TokenScorer
from agentrl.dist.train_state import TrainState


class FSDPEngine:
    """A :class:`~agentrl.dist.engine.TrainEngine` over a causal language model of transformers.

    Args:
        model: an ``AutoModelForCausalLM`` in float32, on the device to train on.
        tokenizer: saved beside exported weights; None exports weights alone.
        config: optimizer, precision and layout (an ``ActorConfig`` is one).
        ranks: where this process stands among those that hold the model.
        head: ``language`` answers ``logprobs``, ``entropy`` and ``sum_pi_squared``; ``value`` is a
            critic's.
        temperature: of the sampled distribution whose log-probabilities are computed.
        total_updates: optimizer steps of the whole run, where the schedule needs them.
        deterministic: same inputs, same bits (on one machine and number of threads).
        trainable: False only reads: no optimizer, no gradients.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig,
        *,
        ranks: Ranks,
        head: Literal["language", "value"] = "language",
        temperature: float = 1.0,
        total_updates: int | None = None,
        deterministic: bool = True,
        trainable: bool = True,
    ) -> None:
        if deterministic:
            require_deterministic_kernels()
        self.model = model
        self.tokenizer = tokenizer
        # Dropout must be off: log-probabilities are compared with those of the rollout engine.
        model.eval()
        model.requires_grad_(trainable)
        self.ranks = ranks.arranged(
            shard_size=config.shard_size, sequence_parallel=config.sequence_parallel
        )
        self._config = config
        self._precision = config.precision
        self._total_updates = total_updates
        self._scorer = TokenScorer(model, temperature=temperature)
        self._optimizer = build_adamw(model, config)
        self.num_updates = 0
        """Optimizer steps taken."""
        self.num_skipped = 0
        """Optimizer steps left out because the gradient was not finite."""
        _ = self.learning_rate  # refuses a schedule that cannot work before anything is trained

    @property
    def learning_rate(self) -> float:
        """Rate of the next optimizer step."""
        return learning_rate(
            self._config, num_updates=self.num_updates, total_updates=self._total_updates
        )

    def train_mini_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        tokens_per_micro_batch: int,
    ) -> dict[str, float]:
        """Accumulate gradients over micro-batches, clip, step.

        Returns:
            The summed metrics of ``loss_fn`` (``*_max``: their maximum), and ``grad_norm``
            (before clipping), ``lr``, ``micro_batches``, ``skipped``. A gradient that is not
            finite leaves weights, optimizer and schedule as they were, with ``skipped`` = 1. A
            batch without any trained token changes nothing (``micro_batches`` = 0).
        """
        metrics: dict[str, float] = {}
        num_micro_batches = 0
        for part, _ in micro_batches(batch, tokens_per_micro_batch):
            with autocast(self.model.device, self._precision):
                scores = self._scorer(part, fields=loss_fn.fields)
            loss, found = loss_fn(scores, _to_device(part, self.model.device))
            loss.backward()
            _merge(metrics, found)
            num_micro_batches += 1
        metrics["micro_batches"] = num_micro_batches
        if num_micro_batches:
            metrics |= self._apply_gradient()
        return metrics

    def infer_batch(
        self, batch: Batch, *, tokens_per_micro_batch: int, fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, Tensor]:
        """Score every trained token; see :meth:`~agentrl.dist.engine.TrainEngine.infer_batch`."""
        return infer_batch(
            self._scorer,
            batch,
            tokens_per_micro_batch=tokens_per_micro_batch,
            fields=fields,
            precision=self._precision,
        )

    def export_params(self) -> Iterator[tuple[str, Tensor]]:
        """Stream parameters and persistent buffers by their names in ``state_dict``.

        Tied tensors come once, under the first of their names. The tensors are the live ones: a
        receiver that keeps them must copy.
        """
        seen: set[int] = set()
        for name, value in self.model.state_dict(keep_vars=True).items():
            if id(value) not in seen:
                seen.add(id(value))
                yield name, value.detach()

    def save(self, directory: Path) -> PendingSave:
        """Begin to write all that resuming needs; see ``TrainEngine.save``."""
        counters = {"num_updates": self.num_updates, "num_skipped": self.num_skipped}
        return self._state().save(directory, counters)

    def load(self, directory: Path) -> None:
        """Undo :meth:`save`, bit for bit; see ``TrainEngine.load``.

        Raises:
            CheckpointError: the state belongs to another model, or is not complete.
        """
        counters = self._state().load(directory)
        self.num_updates, self.num_skipped = counters["num_updates"], counters["num_skipped"]

    def _state(self) -> TrainState:
        return TrainState(
            model=dict(self.export_params()),
            parameters=dict(self.model.named_parameters()),
            optimizer=self._optimizer,
            rank=self.ranks.rank,
            device=self.model.device,
        )

    def export_pretrained(self, directory: Path) -> None:
        """Write weights, configuration and tokenizer as transformers loads them."""
        with _quiet():
            self.model.save_pretrained(directory)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)

    def _apply_gradient(self) -> dict[str, float]:
        lr = self.learning_rate
        limit = self._config.grad_clip or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        finite = math.isfinite(norm)
        if finite:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self.num_updates += 1
        else:
            self.num_skipped += 1
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "lr": lr, "skipped": float(not finite)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing progress bars over the run's own display."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the token fields; the layout stays on the CPU, where it is read."""
    return Batch(
        batch.cu_seqlens,
        {name: value.to(device) for name, value in batch.tokens.items()},
        {name: value.to(device) for name, value in batch.rows.items()},
    )


def _merge(total: dict[str, float], found: Mapping[str, float]) -> None:
    for name, value in found.items():
        if name.endswith("_max"):
            total[name] = max(total.get(name, value), value)
        else:
            total[name] = total.get(name, 0.0) + value
