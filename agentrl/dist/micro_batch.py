"""Cuts a mini-batch into micro-batches that fit a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentrl.batch import Batch, RowView


def plan_micro_batches(lengths: Sequence[int], tokens_per_micro_batch: int) -> list[list[int]]:
    """Group rows of similar length, each group's tokens within the budget.

    Rows are taken in order of (length, index), so the plan depends on nothing but the arguments. A
    row longer than the budget gets a micro-batch of its own: rows are never cut or dropped. Groups
    are as even as their number allows, since a small one keeps a device waiting for its host.

    Args:
        lengths: tokens of each row.
        tokens_per_micro_batch: most tokens of one micro-batch; rows are packed, without padding.

    Returns:
        Row indices of every micro-batch; each row stands in exactly one.
    """
    if tokens_per_micro_batch < 1:
        raise ValueError(f"tokens_per_micro_batch={tokens_per_micro_batch}: must be at least 1")
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    plan = _fill(order, lengths, tokens_per_micro_batch)
    low, high = 0, tokens_per_micro_batch  # a budget above `low` that needs no more groups
    while high - low > 1:
        middle = (low + high) // 2
        tighter = _fill(order, lengths, middle)
        if len(tighter) > len(plan):
            low = middle
        else:
            plan, high = tighter, middle
    return plan


def _fill(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put rows into groups in their order, a new one where the budget is full."""
    plan: list[list[int]] = []
    num_tokens = 0
    for row in order:
        if not plan or num_tokens + lengths[row] > budget:
            plan.append([])
            num_tokens = 0
        plan[-1].append(row)
        num_tokens += lengths[row]
    return plan


def plan_trained_rows(batch: Batch | RowView, tokens_per_micro_batch: int) -> list[list[int]]:
    """Plan the rows of ``batch`` in which a token is trained; the others have nothing to say."""
    rows = batch.sum_by_row("loss_mask").nonzero().squeeze(1)
    lengths = batch.lengths[rows].tolist()
    indices = rows.tolist()
    return [
        [indices[index] for index in group]
        for group in plan_micro_batches(lengths, tokens_per_micro_batch)
    ]


def dummy_batch() -> Batch:
    """Return one trained token behind another: what a rank scores that has run out of rows.

    Sharded weights are gathered by all ranks together, so all take the same number of passes.
    """
    return Batch.from_rows(
        {
            "ids": [torch.zeros(2, dtype=torch.int64)],
            "loss_mask": [torch.tensor([False, True])],
        }
    )
