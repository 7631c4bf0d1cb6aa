"""Where every tensor of a ``transformers`` model lies in vLLM's parameters. Imports no vLLM.

vLLM fuses linear maps and cuts them over tensor-parallel ranks. What it does to a tensor is told by
the class of the layer that holds it, so layers are recognised by the names of their classes; a
layer of any other class must hold whole tensors under the names that ``transformers`` gives them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from agentrl.errors import EngineError

_LORA_WRAPPER = ".base_layer"
"""vLLM wraps a layer that adapters may change and keeps the original under this name."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Placement:
    """A part of a named tensor and the view of vLLM's memory that holds it."""

    name: str
    """Of the whole tensor in ``transformers``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    starts: tuple[int, ...]
    """Where the part begins, along each axis."""
    view: Tensor
    """The part, of as many axes; writing to it writes vLLM's parameter."""
    counted: bool
    """False where another rank holds the same part: a checksum counts every element once."""

    def cut(self, whole: Tensor) -> Tensor:
        """Return the part of ``whole`` that belongs here, without a copy."""
        for axis, start in enumerate(self.starts):
            whole = whole.narrow(axis, start, self.view.shape[axis])
        return whole


def find_placements(
    model: Any, *, packed: Mapping[str, Sequence[str]], tensor_parallel: int, rank: int
) -> list[Placement]:
    """Map all parameters of a vLLM model on one rank, tied ones once.

    Args:
        model: the module as vLLM built it.
        packed: vLLM's ``packed_modules_mapping``: name of a fused layer -> names of its parts.
        tensor_parallel: ranks that the model is split over.
        rank: among them.

    Raises:
        EngineError: a layer is laid out in a way that is not known here.
    """
    found: list[Placement] = []
    seen: set[int] = set()
    for path, layer in model.named_modules():
        for kind, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            whole = path.replace(_LORA_WRAPPER, "")
            parts = list(_parts(layer, kind, parameter.data, whole, packed, tensor_parallel, rank))
            _check_covered(f"{path}.{kind}", layer, parameter, parts)
            found += parts
    return found


def check_names(
    found: Sequence[Placement], expected: Mapping[str, Sequence[int]], *, model: str
) -> None:
    """Refuse to serve a model whose tensors are not exactly those of ``transformers``.

    Args:
        found: the placements of any one rank.
        expected: name -> shape of every parameter of the ``transformers`` model, tied ones once.
        model: its class, for the message.

    Raises:
        EngineError: names what vLLM lacks, has beyond, or holds in another shape.
    """
    shapes = {placement.name: placement.shape for placement in found}
    missing = sorted(expected.keys() - shapes.keys())
    extra = sorted(shapes.keys() - expected.keys())
    wrong = [
        f"{name!r} {shapes[name]} instead of {tuple(expected[name])}"
        for name in sorted(shapes.keys() & expected.keys())
        if shapes[name] != tuple(expected[name])
    ]
    if missing or extra or wrong:
        raise EngineError(
            f"vLLM's {model} cannot take the weights of the model: {len(missing)} tensors have no "
            f"place in it {missing[:3]}, {len(extra)} of its own come from nowhere {extra[:3]}, "
            f"{len(wrong)} are of another shape {wrong[:3]}; use rollout=hf for this architecture"
        )


def _parts(
    layer: Any,
    kind: str,
    data: Tensor,
    path: str,
    packed: Mapping[str, Sequence[str]],
    tensor_parallel: int,
    rank: int,
) -> Iterator[Placement]:
    """Yield what one parameter holds. ``kind`` is its name in the layer: weight or bias."""
    classes = {base.__name__ for base in type(layer).__mro__}
    first = rank == 0
    if "QKVParallelLinear" in classes:
        yield from _qkv(layer, kind, data, path, packed, rank)
    elif "MergedColumnParallelLinear" in classes:
        names = _packed_names(path, packed, len(layer.output_sizes))
        offset = 0
        for name, total in zip(names, layer.output_sizes, strict=True):
            rows = total // tensor_parallel
            view = data[offset : offset + rows]
            offset += rows
            yield _rows(f"{name}.{kind}", view, total, rank * rows, counted=True)
    elif "VocabParallelEmbedding" in classes:  # ParallelLMHead is one
        indices = layer.shard_indices
        start, end = indices.org_vocab_start_index, indices.org_vocab_end_index
        view = data[: end - start]
        yield _rows(f"{path}.{kind}", view, layer.org_vocab_size, start, counted=True)
    elif "ColumnParallelLinear" in classes:
        total = len(data) * tensor_parallel
        yield _rows(f"{path}.{kind}", data, total, rank * len(data), counted=True)
    elif "RowParallelLinear" in classes and kind == "weight":
        shape = (data.shape[0], data.shape[1] * tensor_parallel)
        starts = (0, rank * data.shape[1])
        yield Placement(name=f"{path}.{kind}", shape=shape, starts=starts, view=data, counted=True)
    else:
        yield _rows(f"{path}.{kind}", data, len(data) if data.dim() else 0, 0, counted=first)


def _qkv(
    layer: Any, kind: str, data: Tensor, path: str, packed: Mapping[str, Sequence[str]], rank: int
) -> Iterator[Placement]:
    """Query heads are split over the ranks; of fewer key heads than ranks each has copies."""
    query, key, value = _packed_names(path, packed, 3)
    copies = layer.num_kv_head_replicas
    value_size = getattr(layer, "v_head_size", layer.head_size)
    sizes = [
        (query, layer.num_heads * layer.head_size, layer.total_num_heads * layer.head_size, 1),
        (key, layer.num_kv_heads * layer.head_size, layer.total_num_kv_heads * layer.head_size,
         copies),
        (value, layer.num_kv_heads * value_size, layer.total_num_kv_heads * value_size, copies),
    ]  # fmt: skip
    offset = 0
    for name, rows, total, replicas in sizes:
        view = data[offset : offset + rows]
        offset += rows
        start = rank // replicas * rows
        yield _rows(f"{name}.{kind}", view, total, start, counted=rank % replicas == 0)


def _rows(name: str, view: Tensor, total: int, start: int, *, counted: bool) -> Placement:
    """Return a placement that is cut along the first axis only."""
    if not view.dim():
        return Placement(name=name, shape=(), starts=(), view=view, counted=counted)
    shape = (total, *view.shape[1:])
    starts = (start, *[0] * (view.dim() - 1))
    return Placement(name=name, shape=shape, starts=starts, view=view, counted=counted)


def _packed_names(path: str, packed: Mapping[str, Sequence[str]], count: int) -> list[str]:
    parent, _, fused = path.rpartition(".")
    names = packed.get(fused, ())
    if len(names) != count:
        raise EngineError(
            f"vLLM fuses {count} tensors in {path!r} and does not name them "
            f"(packed_modules_mapping has {list(names)}); use rollout=hf for this architecture"
        )
    return [f"{parent}.{name}" if parent else name for name in names]


def _check_covered(name: str, layer: Any, parameter: Tensor, parts: Sequence[Placement]) -> None:
    """Refuse a parameter of which a part would never be written; padding rows may be left."""
    held = sum(math.prod(part.view.shape) for part in parts)
    if held == parameter.numel() or hasattr(layer, "org_vocab_size"):
        return
    raise EngineError(
        f"vLLM's {name!r} ({type(layer).__name__}, shape {tuple(parameter.shape)}) holds "
        f"{parameter.numel()} elements, of which {held} are known here; use rollout=hf for this "
        "architecture"
    )
