"""Counts the bytes of tensors that are alive, for comparison with what was planned."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of every storage that an operation inside the block made and that is still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {leaf.untyped_storage()._cdata for leaf in _tensors((args, kwargs))}
        for value in _tensors(out):
            storage = value.untyped_storage()
            if storage._cdata in self._known or storage._cdata in before:
                continue
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
