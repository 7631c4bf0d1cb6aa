"""Ragged batches: flat tensors that share ``cu_seqlens``; no padding on the hot path.

Legend: ``B`` rows (one per segment), ``N`` tokens of all rows together, ``T`` longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(slots=True)
class Batch:
    """Rows of different length, packed.

    Attributes:
        cu_seqlens: int64 [B + 1]; row ``b`` is ``[cu_seqlens[b], cu_seqlens[b + 1])``.
        tokens: fields of shape [N], one value per token. ``ids`` (int64) and ``loss_mask`` (bool)
            are always there; ``logprobs``, ``advantages`` and others are float32. A token's value
            stands at the token's own position: ``logprobs[i] = log p(ids[i] | ids[:i])``.
        rows: fields of shape [B], one value per row.
        derived: what :meth:`on_device` has worked out beforehand; of no other batch.
    """

    cu_seqlens: Tensor
    tokens: dict[str, Tensor]
    rows: dict[str, Tensor] = field(default_factory=dict)
    derived: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that every field has the length that ``cu_seqlens`` says."""
        num_tokens, num_rows = int(self.cu_seqlens[-1]), len(self.cu_seqlens) - 1
        for name, value in self.tokens.items():
            if value.shape != (num_tokens,):
                raise ValueError(
                    f"token field {name!r}: shape {tuple(value.shape)}, want ({num_tokens},)"
                )
        for name, value in self.rows.items():
            if value.shape != (num_rows,):
                raise ValueError(
                    f"row field {name!r}: shape {tuple(value.shape)}, want ({num_rows},)"
                )

    @classmethod
    def from_rows(
        cls,
        tokens: Mapping[str, Sequence[Tensor]],
        rows: Mapping[str, Tensor] | None = None,
    ) -> Batch:
        """Pack lists of [T_b] tensors, one list per field.

        Raises:
            ValueError: the fields disagree about the length of a row.
        """
        lengths = [len(row) for row in next(iter(tokens.values()))]
        for name, values in tokens.items():
            if [len(row) for row in values] != lengths:
                raise ValueError(f"token field {name!r} has other row lengths than the first field")
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        cu_seqlens[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        flat = {name: torch.cat(list(values)) for name, values in tokens.items()}
        return cls(cu_seqlens, flat, dict(rows or {}))

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.cu_seqlens) - 1

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.cu_seqlens[-1])

    @property
    def lengths(self) -> Tensor:
        """Tokens per row, int64 [B]."""
        return self.cu_seqlens.diff()

    @property
    def row_of_token(self) -> Tensor:
        """Row index of every token, int64 [N]."""
        return torch.repeat_interleave(torch.arange(self.num_rows), self.lengths)

    @property
    def positions(self) -> Tensor:
        """Position of every token within its row, int64 [N]."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.lengths)
        return torch.arange(self.num_tokens) - starts

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """Return the rows ``indices``, in that order."""
        wanted = torch.as_tensor(indices, dtype=torch.int64)
        spans = [slice(int(self.cu_seqlens[i]), int(self.cu_seqlens[i + 1])) for i in wanted]
        lengths = self.lengths[wanted]
        cu_seqlens = torch.zeros(len(wanted) + 1, dtype=torch.int64)
        cu_seqlens[1:] = lengths.cumsum(0)
        tokens = {
            name: torch.cat([value[span] for span in spans]) if spans else value[:0]
            for name, value in self.tokens.items()
        }
        return Batch(
            cu_seqlens,
            tokens,
            {name: value[wanted] for name, value in self.rows.items()},
        )

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Stack the rows of several batches with the same fields."""
        lengths = torch.cat([batch.lengths for batch in batches])
        cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        cu_seqlens[1:] = lengths.cumsum(0)
        tokens = {
            name: torch.cat([batch.tokens[name] for batch in batches]) for name in batches[0].tokens
        }
        rows = {
            name: torch.cat([batch.rows[name] for batch in batches]) for name in batches[0].rows
        }
        return Batch(cu_seqlens, tokens, rows)

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Cut into consecutive parts of ``sizes`` rows."""
        parts, start = [], 0
        for size in sizes:
            parts.append(self.select(range(start, start + size)))
            start += size
        return parts

    @property
    def trained(self) -> Tensor:
        """Indices of the tokens with ``loss_mask``, int64 [M], ascending."""
        if "trained" in self.derived:
            return self.derived["trained"]
        return self.tokens["loss_mask"].nonzero().squeeze(1)

    @property
    def row_of_trained(self) -> Tensor:
        """Row of each of these tokens, int64 [M]."""
        if "row_of_trained" in self.derived:
            return self.derived["row_of_trained"]
        return self.row_of_token.to(self.tokens["loss_mask"].device)[self.trained]

    def on_device(self, copy: Callable[[Tensor], Tensor]) -> Batch:
        """Return a batch of the CPU with its fields moved by ``copy``; the layout stays.

        :attr:`trained` and :attr:`row_of_trained` are found before, since asking a device how many
        there are would wait for it.
        """
        derived = {"trained": self.trained, "row_of_trained": self.row_of_trained}
        return Batch(
            self.cu_seqlens,
            *(
                {name: copy(value) for name, value in fields.items()}
                for fields in (self.tokens, self.rows, derived)
            ),
        )

    def sum_by_row(self, name: str) -> Tensor:
        """Sum of a token field over each row, int64 [B] of bools and integers, else float [B]."""
        value = self.tokens[name]
        if not value.is_floating_point():
            value = value.long()
        zeros = torch.zeros(self.num_rows, dtype=value.dtype)
        return zeros.index_add(0, self.row_of_token, value)

    def to_padded(self, name: str, pad: float = 0) -> Tensor:
        """Return a token field as [B, T], right-padded: for parity tests, not for training."""
        width = int(self.lengths.max()) if self.num_rows else 0
        out = torch.full((self.num_rows, width), pad, dtype=self.tokens[name].dtype)
        out[self.row_of_token, self.positions] = self.tokens[name]
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tensors as arrays, which protocol 5 moves out of band, without a copy.

        A batch that is read from shared memory (Ray's object store) lies there: it is to be read,
        not written. :meth:`select` and :meth:`concat` give tensors of their own.
        """
        fields = (self.cu_seqlens, self.tokens, self.rows)
        return _unpickled, tuple(_as_arrays(value) for value in fields)


@dataclass(slots=True)
class RowView:
    """Some rows of a batch, in their order, not copied before they are asked for.

    Reads like a :class:`Batch` as far as cutting it into parts goes.
    """

    base: Batch
    indices: Tensor
    """int64 [B], rows of ``base``."""

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.indices)

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.lengths.sum())

    @property
    def lengths(self) -> Tensor:
        """Tokens per row, int64 [B]."""
        return self.base.lengths[self.indices]

    @property
    def cu_seqlens(self) -> Tensor:
        """Where rows begin and end once they are packed, int64 [B + 1]."""
        out = torch.zeros(self.num_rows + 1, dtype=torch.int64)
        out[1:] = self.lengths.cumsum(0)
        return out

    def sum_by_row(self, name: str) -> Tensor:
        """See :meth:`Batch.sum_by_row`."""
        return self.base.sum_by_row(name)[self.indices]

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """Return a copy of the rows ``indices`` of this view, in that order."""
        return self.base.select(self.indices[torch.as_tensor(indices, dtype=torch.int64)])

    def load(self) -> Batch:
        """Return all rows; where those are all of ``base``, ``base`` itself."""
        if torch.equal(self.indices, torch.arange(self.base.num_rows)):
            return self.base
        return self.base.select(self.indices)


def tensor_to_array(value: Tensor) -> tuple[np.ndarray, str]:
    """Return a tensor's values and its dtype; no copy where it lies on the CPU in one piece.

    bfloat16, which numpy lacks, comes as int16 of the same bits.
    """
    value = value.detach().cpu().contiguous()
    name = str(value.dtype).removeprefix("torch.")
    return (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy(), name


def tensor_from_array(array: np.ndarray, dtype: str) -> Tensor:
    """Undo :func:`tensor_to_array`, on the memory of ``array``: where it is shared, only read."""
    if not array.flags.writeable and array.size:
        array = np.asarray(_Memory(array))
    value = torch.from_numpy(array if array.size else array.copy())
    return value.view(torch.bfloat16) if dtype == "bfloat16" else value


class _Memory:
    """Shows a read-only array's memory as writable, for torch knows no other and would warn."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array  # keeps the memory alive
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def _as_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: tensor_to_array(tensor) for name, tensor in value.items()}
    return tensor_to_array(value)


def _unpickled(cu_seqlens: Any, tokens: Any, rows: Any) -> Batch:
    return Batch(
        tensor_from_array(*cu_seqlens),
        {name: tensor_from_array(*found) for name, found in tokens.items()},
        {name: tensor_from_array(*found) for name, found in rows.items()},
    )
