"""A training engine without a model: one number for every token of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.batch import Batch


class TableEngine:
    """A :class:`~agentrl.dist.engine.TrainEngine` over a table, for tests that follow every number.

    As a critic it gives a state the number of its last token; as a policy, a token its own number
    as log-probability, and no entropy. The numbers are parameters, trained by plain gradient
    descent.

    Args:
        table: float [V], a number for every token.
        lr: of gradient descent.

    Attributes:
        table: float32 [V], as trained so far.
        asked: fields of every call of :meth:`infer_batch`, with the number of rows.
        trained: what every call of :meth:`train_mini_batch` was given.
    """

    def __init__(self, table: Sequence[float] | Tensor, *, lr: float = 0.1) -> None:
        self.table = torch.as_tensor(table, dtype=torch.float32).clone().requires_grad_()
        self.num_updates = 0
        self.num_skipped = 0
        self.asked: list[tuple[tuple[str, ...], int]] = []
        self.trained: list[tuple[Batch, Any]] = []
        self._lr = lr

    def train_mini_batch(
        self,
        batch: Batch,
        loss_fn: Callable[[Mapping[str, Tensor], Batch], tuple[Tensor, Mapping[str, Tensor]]],
        *,
        tokens_per_micro_batch: int,
        keep: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Accumulate gradients over micro-batches of rows in order, then step."""
        self.trained.append((batch, loss_fn))
        with torch.no_grad():
            scores = self._scores(batch)
        kept = {f"{name}/tokens": scores[name].detach() for name in keep}
        metrics: dict[str, float] = {}
        parts = list(_parts(batch, tokens_per_micro_batch))
        for rows in parts:
            part = batch.select(rows)
            loss, found = loss_fn(self._scores(part), part)
            loss.backward()
            metrics = {n: metrics.get(n, 0.0) + float(value) for n, value in found.items()}
        gradient = self.table.grad
        assert gradient is not None, "the loss does not depend on the table"
        norm, finite = float(gradient.norm()), bool(gradient.isfinite().all())
        if finite:
            with torch.no_grad():
                self.table -= self._lr * gradient
        self.num_updates += finite
        self.num_skipped += not finite
        self.table.grad = None
        own = {"grad_norm": norm, "lr": self._lr, "skipped": float(not finite)}
        return metrics | own | kept | {"micro_batches": len(parts)}

    @torch.no_grad()
    def infer_batch(
        self, batch: Batch, *, tokens_per_micro_batch: int, fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, Tensor]:
        """Return ``fields`` of the tokens with ``loss_mask``."""
        self.asked.append((tuple(fields), batch.num_rows))
        scores = self._scores(batch)
        return {name: scores[name].detach() for name in fields}

    def export_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the table."""
        yield "table", self.table.detach()

    def save(self, directory: Path) -> TableEngine:
        """Write the table and the counters."""
        state = {"table": self.table.detach(), "updates": self.num_updates}
        torch.save(state | {"skipped": self.num_skipped}, directory / "table.pt")
        return self

    def wait(self) -> None:
        """Nothing is left to write once :meth:`save` has returned."""

    def load(self, directory: Path) -> None:
        """Undo :meth:`save`."""
        state = torch.load(directory / "table.pt")
        with torch.no_grad():
            self.table.copy_(state["table"])
        self.num_updates, self.num_skipped = state["updates"], state["skipped"]

    def export_pretrained(self, directory: Path) -> None:
        """Write the table."""
        torch.save(self.table.detach(), directory / "table.pt")

    def onload(self) -> None:
        """It is always there."""

    def offload(self) -> None:
        """It is always there."""

    def _scores(self, batch: Batch) -> dict[str, Tensor]:
        mask, ids = batch.tokens["loss_mask"], batch.tokens["ids"]
        assert not bool(mask[batch.cu_seqlens[:-1]].any()), "nothing stands before a first token"
        zeros = torch.zeros(batch.num_tokens)
        own = zeros.masked_scatter(mask, self.table[ids[mask]])
        before = zeros.masked_scatter(mask, self.table[ids.roll(1)[mask]])
        return {"logprobs": own, "entropy": zeros, "values": before, "next_values": own}


def _parts(batch: Batch, tokens_per_micro_batch: int) -> Iterator[list[int]]:
    rows: list[int] = []
    num_tokens = 0
    for row, length in enumerate(batch.lengths.tolist()):
        if rows and num_tokens + length > tokens_per_micro_batch:
            yield rows
            rows, num_tokens = [], 0
        rows.append(row)
        num_tokens += length
    yield rows
