"""What a training engine is: it owns the weights and their optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from agentrl.batch import Batch


class LossFn(Protocol):
    """A loss over one micro-batch, already divided by the global denominators."""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor | None, batch: Batch
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss and *sums* of metrics.

        Args:
            logprobs: float32 [N], of each token at its own position (0 at the first of a row).
            entropy: float32 [N] or None where the engine was not asked for it.
            batch: the micro-batch; denominators stand in its rows or in the closure.
        """
        ...


class TrainEngine(Protocol):
    """Holds a policy in training precision.

    The gradient of a mini-batch does not depend on how it is cut into micro-batches.
    """

    def train_mini_batch(
        self, batch: Batch, loss_fn: LossFn, *, tokens_per_micro_batch: int
    ) -> dict[str, float]:
        """Accumulate gradients over micro-batches, clip, step. Returns metrics.

        A non-finite gradient skips the step and is reported as ``skipped`` = 1.
        """
        ...

    def infer_batch(self, batch: Batch, *, tokens_per_micro_batch: int) -> Tensor:
        """Return log-probabilities after temperature, float32 [N], without gradients."""
        ...

    def export_params(self) -> Iterator[tuple[str, Tensor]]:
        """Stream full named tensors, tied ones once."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything that resuming needs: weights, optimizer, schedule, RNG."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo :meth:`state_dict`, bit for bit."""
        ...

    def export_pretrained(self, directory: Path) -> None:
        """Write a directory that ``AutoModelForCausalLM`` loads."""
        ...
