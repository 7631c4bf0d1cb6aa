"""What a training engine is: it owns the weights and their optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from agentrl.batch import Batch


class LossFn(Protocol):
    """A loss over one micro-batch, already divided by the global denominators.

    Can be pickled: it is called in the processes that hold the model.
    """

    @property
    def fields(self) -> tuple[str, ...]:
        """What the model is asked for at every trained token: names of ``infer_batch``."""
        ...

    def __call__(
        self, scores: Mapping[str, Tensor], batch: Batch, /
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the micro-batch's share of the loss and of the metrics.

        Shares of all micro-batches, on all ranks, add up to the mini-batch's value; metrics named
        ``*_max`` are combined by maximum. A metric is a tensor of one value, left on its device:
        reading it would wait for the device in every micro-batch.

        Args:
            scores: :attr:`fields`, float32 [N] each, with gradient: of each trained token at its
                own position, 0 elsewhere.
            batch: the micro-batch; denominators stand in its fields or in the closure.
        """
        ...


class PendingSave(Protocol):
    """A state on its way to disk. The engine may train on meanwhile."""

    def wait(self) -> None:
        """Return once every file is written.

        Raises:
            CheckpointError: they could not be.
        """
        ...


class TrainEngine(Protocol):
    """Holds a model in training precision: one process, or a group of ranks behind it.

    Tokens with ``loss_mask`` are scored; the gradient of a mini-batch does not depend on how it is
    cut into micro-batches, or over how many ranks.
    """

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken."""
        ...

    @property
    def num_skipped(self) -> int:
        """Optimizer steps left out because the gradient was not finite."""
        ...

    def train_mini_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        tokens_per_micro_batch: int,
        keep: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Accumulate gradients over micro-batches, clip, step. Returns metrics.

        A non-finite gradient skips the step and is reported as ``skipped`` = 1. A batch without
        any trained token changes nothing.

        Args:
            keep: scores among ``loss_fn.fields`` that come along, as they were before the step:
                ``<field>/tokens``, float32 [N] on the CPU, 0 where ``loss_mask`` is False.
        """
        ...

    def infer_batch(
        self, batch: Batch, *, tokens_per_micro_batch: int, fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, Tensor]:
        """Score every trained token without gradients.

        Returns:
            Field -> float32 [N] on the CPU, 0 where ``loss_mask`` is False. A policy answers
            ``logprobs`` (after temperature), ``entropy`` (nats) and ``sum_pi_squared`` (sum over
            the vocabulary of squared probabilities); a critic ``values`` (of the state before the
            token) and ``next_values`` (of the state after it).
        """
        ...

    def export_params(self) -> Iterator[tuple[str, Tensor]]:
        """Stream full named tensors, tied ones once; adapters merged."""
        ...

    def save(self, directory: Path) -> PendingSave:
        """Write everything that resuming needs into ``directory``, which exists and is empty.

        Weights, optimizer, counters, torch's generators. Returns once the state is copied: what
        is trained afterwards is not in it.
        """
        ...

    def load(self, directory: Path) -> None:
        """Undo :meth:`save`, bit for bit, at any number of ranks.

        Raises:
            CheckpointError: the state belongs to another model, or is not complete.
        """
        ...

    def export_pretrained(self, directory: Path) -> None:
        """Write a directory that ``AutoModelForCausalLM`` loads; adapters merged."""
        ...

    def onload(self) -> None:
        """Bring to the device what the next phase needs; undone by :meth:`offload`. Idempotent."""
        ...

    def offload(self) -> None:
        """Give the device's memory to another phase, as far as ``offload`` says. Idempotent."""
        ...
