"""Which tensor lies where in which bucket: fixed once, known to sender and receivers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import EngineError
from agentrl.weights.buckets import ALIGNMENT, Slice
from agentrl.weights.served import WeightSpec


@dataclass(slots=True, frozen=True, kw_only=True)
class PlannedBucket:
    """Tensors that travel together."""

    slices: tuple[Slice, ...]
    num_bytes: int

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the tensors, in order, where they lie in ``flat`` uint8 [at least num_bytes]."""
        found = []
        for piece in self.slices:
            raw = flat[piece.offset : piece.offset + piece.num_bytes]
            found.append(raw.view(getattr(torch, piece.dtype)).view(piece.shape))
        return found


@dataclass(slots=True, frozen=True, kw_only=True)
class BucketPlan:
    """The buckets of one set of weights. Can be pickled."""

    buckets: tuple[PlannedBucket, ...]

    @classmethod
    def of(cls, specs: Iterable[WeightSpec], *, bucket_bytes: int) -> BucketPlan:
        """Pack tensors in the order given.

        Args:
            specs: in the order in which the sender has them; see :func:`ordered_like`.
            bucket_bytes: a bucket is at most this large, unless one tensor alone is larger.
        """
        buckets: list[PlannedBucket] = []
        slices: list[Slice] = []
        size = 0
        for spec in specs:
            offset = -(-size // ALIGNMENT) * ALIGNMENT
            num_bytes = math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
            if slices and offset + num_bytes > bucket_bytes:
                buckets.append(PlannedBucket(slices=tuple(slices), num_bytes=size))
                slices, offset = [], 0
            slices.append(
                Slice(name=spec.name, dtype=spec.dtype, shape=tuple(spec.shape), offset=offset)
            )
            size = offset + num_bytes
        if slices:
            buckets.append(PlannedBucket(slices=tuple(slices), num_bytes=size))
        return cls(buckets=tuple(buckets))

    @property
    def slot_bytes(self) -> int:
        """Bytes of the largest bucket."""
        return max((bucket.num_bytes for bucket in self.buckets), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(piece.num_bytes for bucket in self.buckets for piece in bucket.slices)

    def fill(self, params: Iterable[tuple[str, Tensor]]) -> Iterator[list[Tensor]]:
        """Yield the tensors of bucket 0, 1, ... from a stream, each bucket as soon as it is whole.

        Tensors that come earlier than the plan has them are held until their bucket's turn.

        Raises:
            EngineError: a tensor is missing, unknown, doubled, or of another shape.
        """
        wanted = {piece.name: piece for bucket in self.buckets for piece in bucket.slices}
        held: dict[str, Tensor] = {}
        seen: set[str] = set()
        stream = iter(params)
        for bucket in self.buckets:
            missing = {piece.name for piece in bucket.slices} - held.keys()
            while missing:
                name, value = next(stream, (None, None))
                if name is None or value is None:
                    raise EngineError(
                        f"weight update: {len(missing)} tensors missing, the first "
                        f"{min(missing)!r}; send exactly the parameters of the served architecture"
                    )
                _check(name, value, wanted.get(name), seen)
                seen.add(name)
                missing.discard(name)
                held[name] = value
            yield [held.pop(piece.name) for piece in bucket.slices]
        for name, value in stream:
            _check(name, value, wanted.get(name), seen)


def _check(name: str, value: Tensor, piece: Slice | None, seen: set[str]) -> None:
    if piece is None:
        raise EngineError(
            f"weight update: {name!r} is unknown to the engine; send exactly the parameters of the "
            "served architecture"
        )
    if name in seen:
        raise EngineError(f"weight update: {name!r} came twice; send each tensor once")
    if tuple(value.shape) != piece.shape:
        raise EngineError(
            f"weight update: {name!r} has shape {tuple(value.shape)}, expected {piece.shape}; send "
            "the parameters of the served architecture"
        )


def ordered_like(
    specs: Sequence[WeightSpec], sent: Iterable[tuple[str, tuple[int, ...]]]
) -> list[WeightSpec]:
    """Return what an engine serves in the order in which a trainer sends it.

    Args:
        specs: of the engine.
        sent: name and shape of each tensor, in order.

    Raises:
        EngineError: the two do not have the same names and shapes.
    """
    served = {spec.name: spec for spec in specs}
    given = dict(sent)
    missing, unknown = sorted(served.keys() - given.keys()), sorted(given.keys() - served.keys())
    if missing or unknown:
        raise EngineError(
            f"weights cannot be sent: {len(missing)} tensors are served but not trained "
            f"{missing[:3]}, {len(unknown)} trained but not served {unknown[:3]}; engine and "
            "trainer must have the same architecture"
        )
    for name, shape in given.items():
        if tuple(shape) != tuple(served[name].shape):
            raise EngineError(
                f"weights cannot be sent: {name!r} has shape {tuple(shape)} in training and "
                f"{tuple(served[name].shape)} in the engine; both must have the same architecture"
            )
    return [served[name] for name in given]
