"""The weights of the stand-in for an SGLang server: how it loads them and what it says of them.

As SGLang 0.5.16 does for Llamas and Qwens: queries, keys and values are one tensor to it, gates and
up-projections another. A name that it does not know is left out with a word in its log, and the
update is a success. A projection that is larger than its own is cut to size. Any other tensor of
another shape is an exception that nobody catches. Rows can be read of Llamas alone, and of their
keys and values only where a head is as wide as the hidden size over the number of heads.
"""

from __future__ import annotations

import base64
import hashlib
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_SAFE_MODULES = ("builtins", "collections", "torch", "multiprocessing.reduction")
_STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Part of a name -> that of the tensor that it is stacked into, in the order of the stack."""


class _SafeUnpickler(pickle.Unpickler):
    """Loads what SGLang's loads, of what is needed here."""

    def find_class(self, module: str, name: str) -> Any:
        if not any((module + ".").startswith(f"{safe}.") for safe in _SAFE_MODULES):
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class ServedTensors:
    """The parameters of a model of ``transformers``, as a server has them.

    Attributes:
        loses: tells by name which tensors are left as they are although they came, as a broken
            server would.
    """

    def __init__(self, model: Any) -> None:
        self.loses: Callable[[str], bool] = lambda name: False
        self._own: dict[str, Tensor] = dict(model.named_parameters())
        self._config = model.config
        self._is_llama = type(model).__name__ == "LlamaForCausalLM"

    @torch.no_grad()
    def load(self, payload: str) -> None:
        """Load pickled tensors.

        Raises:
            Exception: they are none, or one has another shape; it ends a real server.
        """
        raw = base64.b64decode(payload, validate=True)
        for name, value in dict(_SafeUnpickler(io.BytesIO(raw)).load()).items():
            own = self._own.get(name)
            if own is None:
                logger.warning("Parameter %s not found in params_dict", name)
                continue
            if "_proj." in name:  # each rank takes its part
                along = 1 if ".o_proj." in name or ".down_proj." in name else 0
                along = min(along, value.ndim - 1)
                value = value.narrow(along, 0, own.shape[along])
            assert own.shape == value.shape, (name, own.shape, value.shape)
            if not self.loses(name):
                own.copy_(value)

    def rows(self, name: str, count: int) -> list[Any] | None:
        """Return the first rows of a tensor as the server finds them; None where it cannot."""
        if not self._is_llama or name not in self._own:
            return None
        stack = self._stacks()[_stacked(name)]
        value = torch.cat([self._own[part] for part in stack])[self._offset(name) :]
        return value.detach().float().tolist()[:count]

    def checksums(self) -> dict[str, str]:
        """Return the name of a tensor, as the server has it -> its fingerprint."""
        found = {}
        for name, parts in self._stacks().items():
            total = hashlib.sha256()
            for part in parts:
                raw = self._own[part].detach().contiguous().view(-1).view(torch.uint8)
                total.update(raw.numpy().tobytes())
            found[name] = total.hexdigest()[:16]
        return found

    def _stacks(self) -> dict[str, list[str]]:
        """Return the server's names -> those of the parts, in the order of the stack."""
        found: dict[str, list[str]] = {}
        for name in sorted(self._own, key=_place_in_stack):
            found.setdefault(_stacked(name), []).append(name)
        return found

    def _offset(self, name: str) -> int:
        """Return the row where the server takes a part to begin."""
        heads, key_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        width = self._config.hidden_size // heads
        if "k_proj" in name:
            return heads * width
        if "v_proj" in name:
            return (heads + key_heads) * width
        return self._config.intermediate_size if "up_proj" in name else 0


def _parts_of(name: str) -> Iterator[str]:
    return (part for part in _STACKED if f".{part}." in name)


def _stacked(name: str) -> str:
    part = next(_parts_of(name), None)
    return name if part is None else name.replace(part, _STACKED[part])


def _place_in_stack(name: str) -> int:
    return next((list(_STACKED).index(part) for part in _parts_of(name)), 0)
