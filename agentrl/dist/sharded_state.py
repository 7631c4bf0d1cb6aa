"""Sharded tensors on disk: written by every rank alone, read at any number of ranks.

The layout is that of ``torch.distributed.checkpoint`` with safetensors, so nothing is executed when
it is read::

    shard_00000.safetensors   the chunks of tensors that rank 0 holds, with their offsets
    values_00000.json         what else rank 0 saved: counters, states of generators

Writing needs no word with other ranks: which chunk a rank writes follows from the tensor's own
placement. So the files can be written in a thread while the ranks train on, without a second
process group. Reading plans with ``torch.distributed.checkpoint``: each rank reads the parts of
chunks that its own shards overlap.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, Replicate

from agentrl.errors import CheckpointError

Chunk = tuple[tuple[int, ...], Tensor]
"""Offsets in the whole tensor, and the part that begins there."""
StoredTensors = dict[str, TensorStorageMetadata]
_SHARDING_INFO = "DCP_SHARDING_INFO"  # where HuggingFaceStorageReader looks for offsets


class PendingFiles:
    """Files that a thread writes; a :class:`~agentrl.dist.engine.PendingSave`."""

    def __init__(self, write: Callable[[], None], directory: Path) -> None:
        self._directory = directory
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._future: Future[None] = executor.submit(write)
        executor.shutdown(wait=False)

    def wait(self) -> None:
        """Return once every file is written and forced to disk.

        Raises:
            CheckpointError: one could not be.
        """
        try:
            self._future.result()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot write the files of {str(self._directory)!r}: {error}; free disk space or "
                "make the directory writable"
            ) from error


def save_sharded(
    directory: Path, tensors: Mapping[str, Tensor], values: Mapping[str, Any], *, rank: int
) -> PendingFiles:
    """Write this rank's share of ``tensors``, and its ``values``, into an existing directory.

    Returns once all is copied to host memory: tensors may change right after.

    Args:
        directory: one for all ranks, on a file system that all of them see.
        tensors: the same names on every rank. A ``DTensor`` is written chunk by chunk by the ranks
            that hold it, a replicated one once, a plain tensor by rank 0.
        values: of this rank; what JSON can hold.

    Raises:
        TypeError: ``values`` holds what JSON cannot.
    """
    chunks = {
        name: (offsets, local.to("cpu", copy=True).contiguous())
        for name, tensor in tensors.items()
        if (found := _chunk_to_write(tensor, rank)) is not None
        for offsets, local in (found,)
    }
    text = json.dumps(dict(values))
    return PendingFiles(lambda: _write(directory, chunks, text, rank), directory)


def load_sharded(directory: Path, into: Mapping[str, Tensor], *, rank: int) -> dict[str, Any]:
    """Read tensors in place, and return the values that this rank saved.

    Nothing is changed where the state is refused.

    Args:
        into: every tensor that was saved, plain or ``DTensor``, on any device.

    Returns:
        The values of ``rank``; of rank 0 where fewer ranks saved (see :func:`num_saved_ranks`).

    Raises:
        CheckpointError: the state belongs to another model, is not complete or cannot be read.
    """
    stored = stored_tensors(directory)
    values = read_values(directory, rank=rank)
    _check_same_tensors(into, stored)
    _read(directory, into)
    return values


def load_full(directory: Path, *, prefix: str = "") -> dict[str, Tensor]:
    """Read whole tensors, on the CPU, of a state that any number of ranks saved.

    Args:
        prefix: of the names that are wanted; it is cut off in the result.

    Raises:
        CheckpointError: it is not complete or cannot be read.
    """
    stored = stored_tensors(directory)
    wanted = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in stored.items()
        if name.startswith(prefix)
    }
    _check_complete(stored)
    _read(directory, wanted)
    return {name.removeprefix(prefix): value for name, value in wanted.items()}


def read_values(directory: Path, *, rank: int = 0) -> dict[str, Any]:
    """Return the values that ``rank`` saved; those of rank 0 where fewer ranks saved.

    Raises:
        CheckpointError: there are none, or they cannot be read.
    """
    if rank >= num_saved_ranks(directory):
        rank = 0
    path = directory / _values_name(rank)
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return what a file holds that was written as one JSON object, whoever wrote it since.

    Raises:
        OSError: there is no such file, or no plain one (a pipe would never end).
        ValueError: it holds something else.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is no plain file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object is wanted, got {type(found).__name__}")
    return found


def num_saved_ranks(directory: Path) -> int:
    """Return how many ranks wrote a state."""
    return len(list(directory.glob("values_*.json")))


def stored_tensors(directory: Path) -> StoredTensors:
    """Return shape, dtype and chunks of every tensor of a state, by name.

    Raises:
        CheckpointError: its files cannot be read.
    """
    try:
        found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{str(directory)!r} cannot be read: {error}") from error
    return {n: facts for n, facts in found.items() if isinstance(facts, TensorStorageMetadata)}


def sync_to_disk(path: Path) -> None:
    """Force a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _chunk_to_write(tensor: Tensor, rank: int) -> Chunk | None:
    """Return what this rank writes of a tensor: None where others hold or write it."""
    if not isinstance(tensor, DTensor):
        return ((0,) * tensor.ndim, tensor.detach()) if rank == 0 else None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    copies = zip(tensor.placements, coordinate, strict=True)
    if any(isinstance(placement, Replicate) and at for placement, at in copies):
        return None  # the first of the ranks that hold the same chunk writes it
    local = tensor.to_local().detach()
    if not local.numel() and (tensor.numel() or rank):
        return None  # an uneven split leaves nothing to the last ranks
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), local


def _write(directory: Path, chunks: Mapping[str, Chunk], values: str, rank: int) -> None:
    shard, text = directory / f"shard_{rank:05d}.safetensors", directory / _values_name(rank)
    offsets = {name: {"saved_offsets": list(at)} for name, (at, _) in chunks.items()}
    save_file(
        {name: local for name, (_, local) in chunks.items()},
        shard,
        metadata={"format": "pt", "DCP_VERSION": "1.0", _SHARDING_INFO: json.dumps(offsets)},
    )
    text.write_text(values, encoding="utf-8")
    for path in (shard, text, directory):
        sync_to_disk(path)


def _values_name(rank: int) -> str:
    return f"values_{rank:05d}.json"


def _read(directory: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors in place. Every rank plans for itself: no word with the others is needed."""
    wanted = {name: value.detach() for name, value in into.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(wanted, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    except (CheckpointException, OSError, SafetensorError) as error:
        raise CheckpointError(f"{str(directory)!r} cannot be read: {error}") from error


def _check_same_tensors(own: Mapping[str, Tensor], stored: StoredTensors) -> None:
    """Compare names, shapes, dtypes; refuse tensors of which a part is nowhere."""
    if own.keys() != stored.keys():
        missing, unknown = sorted(own.keys() - stored.keys()), sorted(stored.keys() - own.keys())
        raise CheckpointError(
            f"the checkpoint belongs to another model: it lacks {missing[:3]} "
            f"({len(missing)} in all) and has unknown {unknown[:3]} ({len(unknown)} in all)"
        )
    for name, value in own.items():
        facts = stored[name]
        if facts.properties.dtype != value.dtype or len(facts.size) != value.ndim:
            raise _another_model(name, value, facts)
    _check_complete(stored)
    for name, value in own.items():
        if stored[name].size != value.shape:
            raise _another_model(name, value, stored[name])


def _another_model(name: str, own: Tensor, stored: TensorStorageMetadata) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint belongs to another model: {name!r} is {stored.properties.dtype} "
        f"{tuple(stored.size)}, the model's is {own.dtype} {tuple(own.shape)}"
    )


def _check_complete(stored: StoredTensors) -> None:
    """Refuse tensors of which a part is nowhere: chunks never overlap, so volumes tell."""
    for name, facts in stored.items():
        found = sum(math.prod(chunk.sizes) for chunk in facts.chunks)
        if found != math.prod(facts.size):
            raise CheckpointError(
                f"the checkpoint is not complete: of {name!r} with {math.prod(facts.size)} "
                f"elements only {found} are there; a rank's file is missing"
            )
