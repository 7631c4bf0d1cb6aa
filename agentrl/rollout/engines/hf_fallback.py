"""Any other architecture: ``transformers``' own forward, one cache per row, one row per call.

Slow, but right for whatever ``transformers`` can run: each sequence is computed alone, so
neighbours and arrival order cannot touch it. Its low bits do depend on how its history was split
into calls; a deterministic engine therefore keeps the cache of every living session.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from agentrl.rollout.engines.hf_weights import check_params


class TransformersRunner:
    """Rows over ``model``, each with a cache of its own.

    Args:
        model: a causal language model; owned from here on, since weight updates write into it.
        num_rows: sequences that are decoded at once.
        max_context: tokens of one sequence.
    """

    prefix_exact = False

    def __init__(self, model: Any, *, num_rows: int, max_context: int) -> None:
        self.model = model.eval()
        self.num_rows, self.max_context = num_rows, max_context
        self.vocab_size: int = model.get_input_embeddings().weight.shape[0]  # pyright: ignore
        self._device = next(model.parameters()).device
        # transformers renames the argument; the old name goes with 5.40.
        known = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        self._caches: list[DynamicCache | None] = []
        self.allocate()

    def allocate(self) -> None:
        """Start with empty rows."""
        self._caches = [None] * self.num_rows

    def free(self) -> None:
        """Drop all caches."""
        self._caches = []

    def decode(
        self, ids: np.ndarray, positions: np.ndarray, active: np.ndarray, length: int
    ) -> torch.Tensor:
        """Feed one token to each active row; logits [B, V], zeros where inactive."""
        del length
        logits = torch.zeros(len(ids), self.vocab_size, device=self._device)
        for row in np.flatnonzero(active):
            self.keep_prefix(int(row), int(positions[row]))
            logits[row] = self._forward(int(row), ids[row : row + 1])[: self.vocab_size]
        return logits

    def prefill(
        self,
        ids: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        length: int,
        num_tokens: int,
    ) -> None:
        """Write the first ``counts[p]`` tokens of ``ids[p]`` to row ``rows[p]``."""
        del length, num_tokens
        for row, start, count, tokens in zip(rows, starts, counts, ids, strict=True):
            if count:
                self.keep_prefix(int(row), int(start))
                self._forward(int(row), tokens[:count])

    def _forward(self, row: int, tokens: np.ndarray) -> torch.Tensor:
        """Append tokens to a row; logits [V] of the last."""
        cache = self._caches[row] or DynamicCache(config=self.model.config)
        ids = torch.from_numpy(np.ascontiguousarray(tokens)).to(self._device)
        self._caches[row] = cache
        how = {self._cache_argument: cache, "use_cache": True}
        output = self.model(input_ids=ids.unsqueeze(0), **how)
        return output.logits[0, -1].float()

    def keep_prefix(self, row: int, length: int) -> int:
        """Cut a row back to ``length``; 0 where its kind of cache cannot be cut."""
        cache = self._caches[row]
        held = 0 if cache is None else int(cache.get_seq_length())
        if cache is None or held == length:
            return held
        if held < length or any(type(layer) is not DynamicLayer for layer in cache.layers):
            self._caches[row] = None
            return 0
        for layer in cache.layers:
            layer.keys = layer.keys[..., :length, :].contiguous()  # pyright: ignore
            layer.values = layer.values[..., :length, :].contiguous()  # pyright: ignore
        return length

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Not done here: prefixes are not shared (``prefix_exact`` is False)."""
        raise AssertionError("prefixes are not shared by this runner")

    def move_row(self, source: int, target: int, length: int) -> None:
        """Hand a cache over to another row."""
        del length
        self._caches[target], self._caches[source] = self._caches[source], None

    def save_row(self, row: int, length: int) -> DynamicCache | None:
        """Take the cache out of its row."""
        self.keep_prefix(row, length)
        saved, self._caches[row] = self._caches[row], None
        return saved

    def load_row(self, row: int, saved: DynamicCache | None, length: int) -> None:
        """Put a cache back."""
        del length
        self._caches[row] = saved

    def num_bytes(self, saved: DynamicCache | None) -> int:
        """Memory of the keys and values."""
        if saved is None:
            return 0
        tensors = [t for layer in saved.layers for t in vars(layer).values()]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))

    def assign(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights into the module, all or none.

        Raises:
            EngineError: a tensor is missing, unknown, of another shape, or not finite.
        """
        own = dict(self.model.named_parameters())
        first = {id(value): name for name, value in own.items()}
        every = self.model.named_parameters(remove_duplicate=False)
        tied = {name: first[id(value)] for name, value in every if name not in own}
        shapes = {name: value.shape for name, value in own.items()}
        with torch.no_grad():
            for name, value in check_params(params, shapes, tied).items():
                own[name].copy_(value)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's parameters."""
        for name, value in self.model.named_parameters():
            yield name, value.detach()
