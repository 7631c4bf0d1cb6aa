"""What the scheduler asks of a model: rows that hold sequences, prefill and decode.

Two implementations: :class:`~agentrl.rollout.engines.hf_decoder.StaticDecoder` for the
architectures it knows, :class:`~agentrl.rollout.engines.hf_fallback.TransformersRunner` for all
others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch


class Runner(Protocol):
    """A model with ``num_rows`` places for sequences. All methods block."""

    num_rows: int
    max_context: int
    vocab_size: int
    prefix_exact: bool
    """Keys and values are the same bits however their prefix was split into calls; where this is
    False a deterministic engine neither shares prefixes nor forgets a living session."""

    def decode(
        self, ids: np.ndarray, positions: np.ndarray, active: np.ndarray, length: int
    ) -> torch.Tensor:
        """Feed one token to each row 0..B-1 that is active; return logits [B, V]."""
        ...

    def prefill(
        self,
        ids: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        length: int,
        num_tokens: int,
    ) -> None:
        """Write ``counts[p]`` tokens of ``ids`` [P, C] to row ``rows[p]`` from ``starts[p]`` on.

        ``length`` keys are looked at; ``num_tokens`` rows are computed, at least as many as
        tokens are written.
        """
        ...

    def keep_prefix(self, row: int, length: int) -> int:
        """Cut a row back; return how many positions it holds then: ``length``, or 0."""
        ...

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Let ``target`` begin with the first positions of ``source``."""
        ...

    def move_row(self, source: int, target: int, length: int) -> None:
        """Let ``target`` hold what ``source`` held; ``source`` is free afterwards."""
        ...

    def save_row(self, row: int, length: int) -> Any:
        """Take a sequence out of its row."""
        ...

    def load_row(self, row: int, saved: Any, length: int) -> None:
        """Put the first ``length`` positions of a saved sequence into a row."""
        ...

    def num_bytes(self, saved: Any) -> int:
        """Memory that a saved sequence takes."""
        ...

    def assign(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights in place, all or none.

        Raises:
            EngineError: a tensor is missing, unknown, of another shape, or not finite.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that are served, under the module's names."""
        ...

    def allocate(self) -> None:
        """Allocate the cache."""
        ...

    def free(self) -> None:
        """Give the cache back."""
        ...
