"""Ranks that share the tokens of every row (Ulysses).

Each of ``s`` ranks runs all layers over its part of the packed buffer, ``N / s`` tokens, whichever
rows those are of. Attention alone sees other tokens: before it, ranks exchange tokens for heads,
after which each holds all ``N`` tokens of ``H / s`` heads; behind it, they exchange back. Every
rank computes the same loss from the scores of all, and sends back the gradient of its own part, so
that gradients of ranks add up.

Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme
Long Sequence Transformer Models", 2023.

Legend: ``N`` tokens of the buffer, ``s`` ranks, ``H`` heads, ``K`` key and value heads, ``D`` head
size, ``M`` scored tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd


class SequenceGroup(NamedTuple):
    """The ranks that share rows, and this one's place. Holds what a compiled layer can be given."""

    name: Any
    """Of the process group: a string, which torch gives a type of its own."""
    size: int
    """s"""
    rank: int

    @classmethod
    def of(cls, group: ProcessGroup) -> SequenceGroup:
        """Describe a process group."""
        return cls(group.group_name, group.size(), group.rank())

    def part(self, num_tokens: int) -> slice:
        """Return which tokens of the buffer are this rank's; ``s`` divides their number."""
        share = num_tokens // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup) -> list[Tensor]:
    """Exchange tokens for heads, before attention.

    Args:
        query: [1, H, N / s, D]; ``key``, ``value``: [1, K, N / s, D].

    Returns:
        Query [1, H / s, N, D]; key and value [1, K / s, N, D], or, where ``s`` does not divide
        ``K``, repeated for every head of the query.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    per_rank = heads // group.size
    key, value = (_repeated(part, heads, group.size) for part in (key, value))
    parts = [_tokens_to_heads(part, group) for part in (query, key, value)]
    if kv_heads % group.size:
        times = per_rank // parts[1].shape[1]
        parts[1:] = [part.repeat_interleave(times, dim=1) for part in parts[1:]]
    return parts


def to_tokens(out: Tensor, group: SequenceGroup) -> Tensor:
    """Exchange heads for tokens, behind attention: [1, N, H / s, D] -> [1, N / s, H, D]."""
    _, tokens, heads, size = out.shape
    sent = out.reshape(group.size, tokens // group.size, heads, size)
    got = all_to_all_single_autograd(sent, None, None, group.name)
    return got.transpose(0, 1).reshape(1, tokens // group.size, group.size * heads, size)


def joined(score: Tensor, found: tuple[int, int], total: int, group: SequenceGroup) -> Tensor:
    """Join what ranks have of [M] scores; the gradient of each part goes to its own rank.

    Args:
        score: float32, of the tokens ``found[0]`` to ``found[1]``.
        total: M.
    """
    whole: Any = _Joined.apply(F.pad(score, (found[0], total - found[1])), group.name)
    return whole


def _repeated(part: Tensor, heads: int, size: int) -> Tensor:
    """Repeat key and value heads, as often as is needed to deal them to ``size`` ranks."""
    kv_heads = part.shape[1]
    if kv_heads % size == 0:
        return part
    wanted = size if size % kv_heads == 0 else heads
    return part.repeat_interleave(wanted // kv_heads, dim=1)


def _tokens_to_heads(part: Tensor, group: SequenceGroup) -> Tensor:
    _, heads, tokens, size = part.shape
    sent = part.reshape(group.size, heads // group.size, tokens, size).transpose(1, 2)
    got = all_to_all_single_autograd(sent.contiguous(), None, None, group.name)
    # [source, token of source, head, D]: sources in order are the tokens in order.
    return got.reshape(1, group.size * tokens, heads // group.size, size).transpose(1, 2)


class _Joined(torch.autograd.Function):
    """Sum over ranks forward; the same loss stands on every rank, so gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, name: Any) -> Tensor:
        return all_reduce(padded, "sum", name)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None]:
        return grads[0], None
