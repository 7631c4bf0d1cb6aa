"""Cuts a mini-batch into micro-batches that fit a budget of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from agentrl.batch import Batch



def plan_micro_batches(lengths: Sequence[int], tokens_per_micro_batch: int) -> list[list[int]]:
    """Group rows of similar length, each group padded to its longest within the budget.

    Rows are taken in order of (length, index), so the plan depends on nothing but the arguments,
    and little is padded. A row longer than the budget gets a micro-batch of its own: rows are
    never cut or dropped.

    Args:
        lengths: tokens of each row.
        tokens_per_micro_batch: most ``rows * longest row`` of one micro-batch.

    Returns:
        Row indices of every micro-batch; each row stands in exactly one.
    """
    if tokens_per_micro_batch < 1:
        raise ValueError(f"tokens_per_micro_batch={tokens_per_micro_batch}: must be at least 1")
    plan: list[list[int]] = []
    current: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (lengths[row], row)):
        # In this order the row at hand is the longest so far.
        if current and lengths[row] * (len(current) + 1) > tokens_per_micro_batch:
            plan.append(current)
            current = []
        current.append(row)
    if current:
        plan.append(current)
    return plan


def micro_batches(batch: Batch, tokens_per_micro_batch: int) -> Iterator[tuple[Batch, list[int]]]:
    """Yield parts of ``batch`` and their row indices, without the rows that train nothing."""
    trained = torch.zeros(batch.num_rows, dtype=torch.int64).index_add(
        0, batch.row_of_token, batch.tokens["loss_mask"].long()
    )
    rows = trained.nonzero().squeeze(1).tolist()
    lengths = batch.lengths[rows].tolist()
    for plan in plan_micro_batches(lengths, tokens_per_micro_batch):
        chosen = [rows[index] for index in plan]
        yield batch.select(chosen), chosen
