"""Which numbers of ranks, shards and heads fit together. Imports no torch.

Ranks of one sequence-parallel group are neighbours: rank ``r`` belongs to the data-parallel rank
``r // sequence_parallel``. Weights are sharded over ``shard_size`` neighbouring ranks, and the
shards replicated over the rest (HSDP).
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_RANKS = 65_536
"""Of a role: only catches a slip of the hand."""


def layout_problems(
    role: str,
    *,
    num_ranks: int,
    shard_size: int,
    sequence_parallel: int,
    more_ranks: str = "cluster=ray placement.pools.train.ranks",
) -> Iterator[str]:
    """Say what cannot divide, each with the nearest values that can.

    Args:
        role: ``actor`` or ``critic``: where the settings stand.
        num_ranks: processes of the role's pool.
        shard_size: of the engine's settings; 0 shards over all ranks.
        sequence_parallel: of the engine's settings.
        more_ranks: settings that a number of ranks follows.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        yield f"{num_ranks} ranks for {role}: must be between 1 and {MAX_RANKS}"
        return
    ranks = f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"
    if shard_size < 0 or (shard_size and num_ranks % shard_size):
        near = _join(nearest_divisors(num_ranks, shard_size))
        yield (
            f"{role}.shard_size={shard_size}: must divide the {ranks} of its pool; "
            f"write {near}, or 0 to shard over all of them"
        )
    if sequence_parallel < 1 or num_ranks % sequence_parallel:
        near = _join(nearest_divisors(num_ranks, sequence_parallel))
        more = ""
        if 1 < sequence_parallel <= MAX_RANKS:
            multiple = -(-num_ranks // sequence_parallel) * sequence_parallel
            more = f", or have {multiple} ranks: {more_ranks}={multiple}"
        yield (
            f"{role}.sequence_parallel={sequence_parallel}: must divide the {ranks} of its pool; "
            f"write {near}{more}"
        )


def head_problems(role: str, *, num_heads: int, sequence_parallel: int) -> Iterator[str]:
    """Say where the attention heads cannot be dealt out evenly.

    Key and value heads need not divide: where there are fewer than ranks they are repeated.
    """
    if sequence_parallel >= 1 and num_heads % sequence_parallel:
        near = _join(nearest_divisors(num_heads, sequence_parallel))
        yield (
            f"{role}.sequence_parallel={sequence_parallel}: must divide the model's {num_heads} "
            f"attention heads; write {near}"
        )


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the largest divisor of ``number`` below ``wanted`` and the smallest above, if any."""
    divisors = [value for value in range(1, number + 1) if number % value == 0]
    below = [value for value in divisors if value < wanted][-1:]
    above = [value for value in divisors if value > wanted][:1]
    return below + above


def _join(values: list[int]) -> str:
    return " or ".join(map(str, values))
