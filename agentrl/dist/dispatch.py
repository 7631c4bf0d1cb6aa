"""How one call of a group becomes one call per rank, and their results one result.

Five ways: :class:`OneToAll`, :class:`AllToAll`, :class:`RankZero`, :class:`Collective` and
:class:`DataParallel`; any other object with ``split`` and ``collect`` serves as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from agentrl.batch import Batch
from agentrl.dist.balance import partition_rows


@dataclass(slots=True, frozen=True)
class Call:
    """Arguments of a method."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def map(self, change: Callable[[Any], Any]) -> Call:
        """Return the call with ``change`` applied to every argument."""
        kwargs = {name: change(value) for name, value in self.kwargs.items()}
        return Call(tuple(change(value) for value in self.args), kwargs)

    @property
    def values(self) -> list[Any]:
        """Every argument."""
        return [*self.args, *self.kwargs.values()]


@dataclass(slots=True, frozen=True)
class Handle:
    """A value that stays where it is, such as in Ray's object store.

    Handed to a call, it goes to the ranks without passing through the driver.
    """

    reference: Any
    """What the group that made it finds it by."""
    cu_seqlens: Tensor | None = None
    """Layout of a :class:`~agentrl.batch.Batch`, int64 [B + 1]: it can be cut without being seen.
    None for any other value."""


@dataclass(slots=True, frozen=True)
class Shard:
    """Some rows of a batch: an argument on its way to a rank, where it is a ``RowView``."""

    source: Batch | Handle
    rows: Tensor
    """int64 [rows of the rank]."""


class Layout:
    """The ranks of a group.

    Args:
        world_size: how many there are.
        ask: name of a mesh -> what every rank's ``Worker.data_rank`` answers; asked once a mesh.
    """

    def __init__(self, world_size: int, ask: Callable[[str | None], Sequence[int]]) -> None:
        self.world_size = world_size
        self._ask = ask
        self._meshes: dict[str | None, tuple[int, ...]] = {}

    def data_ranks(self, mesh: str | None) -> tuple[int, ...]:
        """Return every rank's share of a data-parallel call, by rank."""
        if mesh not in self._meshes:
            self._meshes[mesh] = tuple(self._ask(mesh))
        return self._meshes[mesh]


class Dispatch(Protocol):
    """Splits the arguments of a call over ranks, and joins what they return."""

    def split(self, call: Call, layout: Layout) -> Sequence[Call | None]:
        """Return every rank's arguments, by rank; None for a rank that is not called."""
        ...

    def collect(self, results: Sequence[Any], calls: Sequence[Call | None], layout: Layout) -> Any:
        """Join what the ranks returned.

        Args:
            results: by rank; None for a rank that was not called.
            calls: what :meth:`split` returned.
        """
        ...


class OneToAll:
    """Every rank gets the same arguments; the result is the list of theirs, by rank."""

    def split(self, call: Call, layout: Layout) -> Sequence[Call | None]:
        """Repeat the call."""
        return [call] * layout.world_size

    def collect(self, results: Sequence[Any], calls: Sequence[Call | None], layout: Layout) -> Any:
        """Return the list."""
        return list(results)


class Collective(OneToAll):
    """Every rank gets the same arguments and takes part; the result is that of rank 0."""

    def collect(self, results: Sequence[Any], calls: Sequence[Call | None], layout: Layout) -> Any:
        """Return rank 0's."""
        return results[0]


class AllToAll(OneToAll):
    """Every argument is a sequence with one entry per rank; the result is such a list."""

    def split(self, call: Call, layout: Layout) -> Sequence[Call | None]:
        """Deal the entries.

        Raises:
            ValueError: an argument has not one entry per rank.
        """
        for value in call.values:
            if not isinstance(value, Sequence) or len(value) != layout.world_size:
                got = f"{len(value)} of them" if isinstance(value, Sequence) else type(value)
                raise ValueError(
                    f"an argument of an all-to-all call is a sequence of {layout.world_size} "
                    f"entries, one per rank; got {got}"
                )
        return [call.map(lambda value, r=rank: value[r]) for rank in range(layout.world_size)]


class RankZero:
    """Rank 0 alone is called; the result is its own. Not for methods with collectives."""

    def split(self, call: Call, layout: Layout) -> Sequence[Call | None]:
        """Leave out the others."""
        return [call, *[None] * (layout.world_size - 1)]

    def collect(self, results: Sequence[Any], calls: Sequence[Call | None], layout: Layout) -> Any:
        """Return rank 0's."""
        return results[0]


@dataclass(slots=True, frozen=True, kw_only=True)
class DataParallel:
    """Every data rank gets its rows of the batches, and the other arguments as they are.

    Rows are dealt so that ranks get about the same number of tokens. Ranks of one data rank (a
    sequence-parallel group) get the same rows, and the first of them answers. What the data ranks
    return is joined by kind:

    * a mapping: its tensors hold one value per token of the rank's rows, and come back in the order
      of the whole batch; its numbers are added up, those named ``*_max`` combined by maximum, and
      those in ``replicated`` taken from data rank 0; of anything else comes the list;
    * anything else: the list by data rank.
    """

    mesh_argument: int | None = None
    """Position of the argument that names the mesh, such as a role; None for the ranks' own."""
    replicated: frozenset[str] = frozenset()
    """Names of numbers that are the same on all ranks."""

    def split(self, call: Call, layout: Layout) -> Sequence[Call | None]:
        """Cut the batches.

        Raises:
            ValueError: there is no batch, or there are several with rows of other lengths.
        """
        data_ranks = self._data_ranks(call, layout)
        rows = partition_rows(_lengths(call).tolist(), max(data_ranks) + 1)

        def cut(value: Any, data_rank: int) -> Any:
            return (
                Shard(value, torch.tensor(rows[data_rank], dtype=torch.int64))
                if _is_batch(value)
                else value
            )

        return [call.map(lambda value, d=data_rank: cut(value, d)) for data_rank in data_ranks]

    def collect(self, results: Sequence[Any], calls: Sequence[Call | None], layout: Layout) -> Any:
        """Join results, those of a data rank's first rank."""
        first = calls[0]
        assert first is not None, "every rank is called"
        data_ranks = self._data_ranks(first, layout)
        firsts = [data_ranks.index(data_rank) for data_rank in range(max(data_ranks) + 1)]
        found = [results[rank] for rank in firsts]
        if not all(isinstance(result, Mapping) for result in found):
            return found
        shards = [_shard(calls[rank]) for rank in firsts]
        names = dict.fromkeys(name for result in found for name in result)
        return {name: self._join(name, found, shards) for name in names}

    def _data_ranks(self, call: Call, layout: Layout) -> tuple[int, ...]:
        mesh = None if self.mesh_argument is None else call.args[self.mesh_argument]
        return layout.data_ranks(mesh)

    def _join(self, name: str, results: Sequence[Mapping[str, Any]], shards: list[Shard]) -> Any:
        values = [result[name] for result in results if name in result]
        if isinstance(values[0], Tensor):
            if len(values) < len(results):
                raise ValueError(f"field {name!r} came from {len(values)} of {len(results)} ranks")
            return scatter_tokens(values, shards)
        if name in self.replicated:
            return values[0]
        if not isinstance(values[0], int | float):
            return values
        return max(values) if name.endswith("_max") else sum(values)


def scatter_tokens(values: Sequence[Tensor], shards: Sequence[Shard]) -> Tensor:
    """Bring per-token values of parts, [N_part] each, into the order of the whole batch, [N].

    Raises:
        ValueError: a part has not one value for each of its tokens.
    """
    cu_seqlens = _cu_seqlens(shards[0].source)
    out = torch.empty(int(cu_seqlens[-1]), dtype=values[0].dtype)
    for value, shard in zip(values, shards, strict=True):
        starts, ends = cu_seqlens[shard.rows], cu_seqlens[shard.rows + 1]
        if value.shape != (int((ends - starts).sum()),):
            raise ValueError(
                f"a data-parallel method returned a tensor of shape {tuple(value.shape)} for rows "
                f"with {int((ends - starts).sum())} tokens; return one value for each of them"
            )
        at = 0
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            out[start:end] = value[at : at + end - start]
            at += end - start
    return out


def _is_batch(value: Any) -> bool:
    return isinstance(value, Batch) or (isinstance(value, Handle) and value.cu_seqlens is not None)


def _cu_seqlens(source: Batch | Handle) -> Tensor:
    assert source.cu_seqlens is not None, "only batches are cut"
    return source.cu_seqlens


def _lengths(call: Call) -> Tensor:
    """Return the tokens of each row, int64 [B], of the batches among the arguments."""
    found = [_cu_seqlens(value) for value in call.values if _is_batch(value)]
    if not found or any(not torch.equal(other, found[0]) for other in found[1:]):
        raise ValueError(
            f"a data-parallel call takes a Batch, or several with rows of the same lengths; got "
            f"{len(found)} (a reference has to be a Handle that knows its rows)"
        )
    return found[0].diff()


def _shard(call: Call | None) -> Shard:
    assert call is not None, "every rank is called"
    return next(value for value in call.values if isinstance(value, Shard))
