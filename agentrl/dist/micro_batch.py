"""Cuts a mini-batch into micro-batches that fit a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence


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
