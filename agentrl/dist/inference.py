"""Scoring a batch without gradients, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from agentrl.batch import Batch, RowView
from agentrl.dist.micro_batch import dummy_batch, plan_trained_rows
from agentrl.dist.scoring import Scorer


@torch.no_grad()
def infer_batch(
    scorer: Scorer,
    batch: Batch | RowView,
    *,
    tokens_per_micro_batch: int,
    fields: Sequence[str],
    num_passes: Callable[[int], int] = lambda planned: planned,
) -> dict[str, Tensor]:
    """Score every trained token: field -> float32 [N] on the CPU, 0 where not trained.

    Args:
        num_passes: micro-batches that this rank has rows for -> those that all ranks take.
    """
    plan = plan_trained_rows(batch, tokens_per_micro_batch)
    num_dummies = num_passes(len(plan)) - len(plan)  # ranks agree before any of them starts
    found: list[dict[str, Tensor]] = [scorer(batch.select(rows), fields=fields) for rows in plan]
    for _ in range(num_dummies):
        scorer(dummy_batch(), fields=fields)
    return in_batch_order(batch, plan, found, fields=fields)


def in_batch_order(
    batch: Batch | RowView,
    plan: Sequence[Sequence[int]],
    found: Sequence[Mapping[str, Tensor]],
    *,
    fields: Sequence[str],
) -> dict[str, Tensor]:
    """Bring the scores of micro-batches into the order of the batch they were cut from.

    Args:
        plan: rows of each micro-batch.
        found: of each of them, field -> [tokens of the micro-batch].

    Returns:
        Field -> float32 [N] on the CPU, 0 for rows in no micro-batch.
    """
    out = {name: torch.zeros(batch.num_tokens) for name in fields}
    if plan and fields:
        places = _places(batch, [row for rows in plan for row in rows])
        for name in fields:
            # One transfer at the end: the device is not waited for in between.
            out[name][places] = torch.cat([scores[name] for scores in found]).cpu()
    return out


def _places(batch: Batch | RowView, rows: Sequence[int]) -> Tensor:
    """Return where the tokens of ``rows``, behind one another, stand in ``batch``: int64."""
    wanted = torch.tensor(rows)
    lengths, starts = batch.lengths[wanted], batch.cu_seqlens[wanted]
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1])) + torch.repeat_interleave(starts - ends + lengths, lengths)
