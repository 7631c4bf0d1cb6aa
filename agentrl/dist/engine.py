"""What a training engine is: it owns the weights and their optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from agentrl.batch import Batch


class LossFn(Protocol):
    """A loss over one micro-batch, already divided by the global denominators."""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, batch: Batch, /
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the micro-batch's share of the loss and of the metrics.

        Shares of all micro-batches add up to the mini-batch's value; metrics named ``*_max`` are
        combined by maximum.

        Args:
            logprobs: float32 [N], of each trained token at its own position, 0 elsewhere.
            entropy: float32 [N], nats, likewise; None where the engine was not asked for it.
            batch: the micro-batch; denominators stand in its fields or in the closure.
        """
        ...


class TrainEngine(Protocol):
    """Holds a policy in training precision.

    Tokens with ``loss_mask`` are scored; the gradient of a mini-batch does not depend on how it is
    cut into micro-batches.
    """

    num_updates: int
    """Optimizer steps taken."""
    num_skipped: int
    """Optimizer steps left out because the gradient was not finite."""

    def train_mini_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        tokens_per_micro_batch: int,
        with_entropy: bool = False,
    ) -> dict[str, float]:
        """Accumulate gradients over micro-batches, clip, step. Returns metrics.

        A non-finite gradient skips the step and is reported as ``skipped`` = 1. A batch without
        any trained token changes nothing.
        """
        ...

    def infer_batch(
        self, batch: Batch, *, tokens_per_micro_batch: int, fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, Tensor]:
        """Score every trained token without gradients.

        Returns:
            Field -> float32 [N] on the CPU, 0 where ``loss_mask`` is False: of ``logprobs``
            (after temperature), ``entropy`` (nats) and ``sum_pi_squared`` (sum over the vocabulary
            of squared probabilities) those that were asked for.
        """
        ...

    def export_params(self) -> Iterator[tuple[str, Tensor]]:
        """Stream full named tensors, tied ones once."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything that resuming needs: weights, optimizer, schedule, RNG.

        Nested dictionaries of tensors and plain JSON values.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Undo :meth:`state_dict`, bit for bit.

        Raises:
            CheckpointError: the state belongs to another model.
        """
        ...

    def export_pretrained(self, directory: Path) -> None:
        """Write a directory that ``AutoModelForCausalLM`` loads."""
        ...
