"""Deals rows to data-parallel ranks so that all have about the same number of tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

MANY_ROWS = 1024


def partition_rows(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Deal rows to parts of nearly equal sums: few rows by the largest differencing method.

    Of more rows than :data:`MANY_ROWS` each goes, longest first, to the part with the smallest sum:
    that is ten times as fast, and the short rows at the end even out what the long ones left.

    Where there are fewer rows than parts, some stay empty. Depends on the arguments alone, so that
    a resumed run deals as the first one did. The largest and the smallest sum differ by at most
    the longest row, and mostly by far less.

    Source: Karmarkar and Karp, "The differencing method of set partitioning", 1982.

    Args:
        lengths: tokens of each row, or another cost of at least 0.
        num_parts: ranks that rows are dealt to.

    Returns:
        Row indices of every part, ascending; each row stands in exactly one.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts}: must be at least 1")
    if not lengths:
        return [[] for _ in range(num_parts)]
    if len(lengths) > MANY_ROWS:
        return _ordered(_longest_first(lengths, num_parts))
    # An entry is a partial solution: parts with their sums, largest first. Two solutions of the
    # largest spread are merged by adding the largest part of one to the smallest of the other.
    empty: list[tuple[int, list[int]]] = [(0, [])] * (num_parts - 1)
    solutions = [
        (-length, row, [(length, [row]), *empty] if num_parts > 1 else [(length, [row])])
        for row, length in enumerate(lengths)
    ]
    heapq.heapify(solutions)
    while len(solutions) > 1:
        _, first, left = heapq.heappop(solutions)
        _, second, right = heapq.heappop(solutions)
        merged = [
            (sum_left + sum_right, rows_left + rows_right)
            for (sum_left, rows_left), (sum_right, rows_right) in zip(
                left, reversed(right), strict=True
            )
        ]
        merged.sort(key=lambda part: (-part[0], part[1]))
        spread = merged[0][0] - merged[-1][0]
        heapq.heappush(solutions, (-spread, min(first, second), merged))
    return _ordered([rows for _, rows in solutions[0][2]])


def _longest_first(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sums = [(0, part) for part in range(num_parts)]  # a heap
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        total, part = sums[0]
        parts[part].append(row)
        heapq.heapreplace(sums, (total + lengths[row], part))
    return parts


def _ordered(parts: list[list[int]]) -> list[list[int]]:
    """Sort the rows of every part, and parts by first row, which says nothing of their sums."""
    return sorted((sorted(rows) for rows in parts), key=lambda rows: (not rows, rows[:1]))
