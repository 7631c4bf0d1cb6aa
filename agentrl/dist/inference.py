"""Scoring a batch without gradients, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agentrl.batch import Batch, RowView
from agentrl.dist.micro_batch import dummy_batch, plan_trained_rows
from agentrl.dist.scoring import TokenScorer


@torch.no_grad()
def infer_batch(
    scorer: TokenScorer,
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
    out = {name: torch.zeros(batch.num_tokens) for name in fields}
    if plan:
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
