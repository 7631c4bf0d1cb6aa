"""What the loop asks of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from agentrl.train.assemble import TrainBatch
from agentrl.train.checkpoint import Part

Metrics = dict[str, Any]


class Weights(Protocol):
    """Carries the policy from the training engine to whoever samples it."""

    async def publish(self, *, version: int) -> Metrics:
        """Return once ``version`` is what is sampled.

        Raises:
            EngineError: the served weights are not those that were sent.
        """
        ...


class Placement(Protocol):
    """Who owns the device."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """Hold the device for an update: a colocated engine sleeps meanwhile."""
        ...


class Learner(Protocol):
    """The algorithm of one step."""

    def assign_credit(self, batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """Return the rows that train, with advantages, and metrics."""
        ...

    def measure_mismatch(self, batch: TrainBatch, step: int) -> Metrics:
        """Compare engine and trainer before the update, where it will not be free in it."""
        ...

    def update(self, train_batch: TrainBatch, step: int) -> Metrics:
        """Make the optimizer steps; returns their metrics."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs beyond the engine's own state."""
        ...


class Checkpoints(Protocol):
    """Atomic snapshots of a run, by step."""

    def save(
        self,
        step: int,
        parts: Mapping[str, Part],
        progress: dict[str, Any],
        *,
        score: float | None,
    ) -> None:
        """Begin to write a complete checkpoint, or none; returns once the state is copied.

        Args:
            parts: by name: engines by role, and groups that wait.
            score: success on held-out tasks, where it was measured at this step; higher is better.

        Raises:
            CheckpointError: it, or the one before, could not be written; earlier ones are intact.
        """
        ...

    def flush(self) -> None:
        """Wait for what is being written.

        Raises:
            CheckpointError: it could not be.
        """
        ...
