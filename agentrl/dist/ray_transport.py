"""Arguments and results of a call on their way between the driver and ranks of Ray.

Bulk goes through the object store once, whoever reads it: a batch is put there whole, and each rank
is told its rows. What is smaller goes with the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from agentrl.batch import Batch, RowView, tensor_from_array, tensor_to_array
from agentrl.dist.dispatch import Call, Handle, Shard
from agentrl.dist.stored_model import StoredModel, store_model
from agentrl.model.load import LoadedModel
from agentrl.weights.buckets import Bucket

FETCH_TIMEOUT_S = 600.0
"""For what is in the store to arrive from another node."""
BULK_BYTES = 100_000
"""Arguments from this size on are put into the store once; Ray puts a copy for every rank."""


@dataclass(slots=True, frozen=True)
class _Leaf:
    """Stands for the call's bulk argument number ``index``."""

    index: int
    rows: np.ndarray | None = None
    """Rows of a batch that the rank is given, int64."""


@dataclass(slots=True, frozen=True)
class _Array:
    """A tensor on its way."""

    values: np.ndarray
    dtype: str


@dataclass(slots=True, frozen=True)
class Message:
    """A rank's call, but for the bulk, which Ray resolves: it stands beside the message."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def open(self, bulk: Sequence[Any]) -> Call:
        """Return the call as the worker is to see it."""

        def arrived(value: Any) -> Any:
            if not isinstance(value, _Leaf):
                return unpack(value)
            found = unpack(bulk[value.index])
            return found if value.rows is None else RowView(found, torch.from_numpy(value.rows))

        return Call(self.args, self.kwargs).map(arrived)


def store(model: LoadedModel) -> StoredModel:
    """Put a model into the store of the cluster, from where ranks open it."""
    return store_model(model, put=ray.put, fetch=_fetch)


def _fetch(reference: Any) -> Bucket:
    return ray.get(reference, timeout=FETCH_TIMEOUT_S)


class Sender:
    """Makes messages of the calls of one method to all ranks; what they share is put once."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Any, Any]] = {}

    def message(self, call: Call) -> tuple[Message, list[Any]]:
        """Return a rank's message and the references of its bulk."""
        bulk: list[Any] = []

        def sent(value: Any) -> Any:
            source = value.source if isinstance(value, Shard) else value
            reference = self._reference(source)
            if reference is None:
                return pack(value)
            bulk.append(reference)
            return _Leaf(len(bulk) - 1, value.rows.numpy() if isinstance(value, Shard) else None)

        own = call.map(sent)
        return Message(own.args, own.kwargs), bulk

    def _reference(self, value: Any) -> Any:
        """Return a reference for what goes as bulk; None for what goes with the message."""
        if isinstance(value, Handle):
            return value.reference
        if isinstance(value, ray.ObjectRef):
            return value
        if not isinstance(value, Batch) and _num_bytes(value) < BULK_BYTES:
            return None
        if id(value) not in self._stored:
            # The value is kept too, so that its id stays its own.
            self._stored[id(value)] = (value, ray.put(pack(value)))
        return self._stored[id(value)][1]


def pack(value: Any) -> Any:
    """Replace tensors by arrays, which Ray moves without copying, in containers too."""
    return _map(value, Tensor, lambda tensor: _Array(*tensor_to_array(tensor)))


def unpack(value: Any) -> Any:
    """Undo :func:`pack`. Tensors are the receiver's own; batches lie where they were put."""
    return _map(value, _Array, lambda array: tensor_from_array(array.values, array.dtype).clone())


def _map(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {name: _map(item, kind, change) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(item, kind, change) for item in value)
    return value


def _num_bytes(value: Any) -> int:
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes
    if isinstance(value, bytes | bytearray):
        return len(value)
    if type(value) is dict:
        return sum(_num_bytes(item) for item in value.values())
    if type(value) in (list, tuple):
        return sum(_num_bytes(item) for item in value)
    return 0
