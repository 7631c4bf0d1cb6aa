"""Nested state as JSON beside safetensors: exact, and nothing is executed when it is read.

A state is made of dictionaries with text keys, lists, text, numbers, booleans, None and tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from agentrl.dist.sharded_state import read_json_object

JSON_NAME = "state.json"
TENSORS_NAME = "tensors.safetensors"
_MARK = "tensor://"


@dataclass(slots=True, kw_only=True, frozen=True)
class EncodedState:
    """A copy of a state, ready to be written."""

    text: str
    tensors: Mapping[str, Tensor]

    def write(self, directory: Path) -> None:
        """Write the state into an existing directory.

        Raises:
            OSError, SafetensorError: the files cannot be written.
        """
        (directory / JSON_NAME).write_text(self.text, encoding="utf-8")
        save_file(dict(self.tensors), directory / TENSORS_NAME)


def encode_state(state: Mapping[str, Any]) -> EncodedState:
    """Copy ``state``: what changes in it afterwards is not written.

    Raises:
        TypeError: a value that cannot be stored; says where in the state it stands.
    """
    text, tensors = _encode(state)
    return EncodedState(text=text, tensors=tensors)


def check_storable(state: Mapping[str, Any]) -> None:
    """Refuse what :func:`encode_state` could not encode; keeps nothing.

    Raises:
        TypeError: a value that cannot be stored; says where in the state it stands.
    """
    _, tensors = _encode(state)
    try:
        save(tensors)
    except (SafetensorError, ValueError) as error:
        raise TypeError(f"its tensors cannot be stored: {error}") from error


def _encode(state: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    try:
        return json.dumps(_split(state, "", tensors)), tensors
    except RecursionError as error:
        raise TypeError("it is nested too deeply, or holds itself") from error
    except ValueError as error:  # a whole number of more digits than Python writes
        raise TypeError(f"it holds what JSON cannot: {error}") from error


def read_state(directory: Path) -> dict[str, Any]:
    """Undo :meth:`EncodedState.write`; tensors come on the CPU.

    Raises:
        OSError, ValueError, SafetensorError: the files are missing or damaged.
    """
    skeleton = read_json_object(directory / JSON_NAME)
    return _join(skeleton, load_file(directory / TENSORS_NAME))


def _split(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` with every tensor moved to ``tensors`` and replaced by its name."""
    if isinstance(value, Tensor):
        if path in tensors:
            raise TypeError(f"two tensors would be stored under {path!r}")
        # A contiguous copy of its own: the format refuses memory that is shared.
        if value.is_meta or value.layout is not torch.strided:
            raise TypeError(f"{path} is a tensor without plain memory, which cannot be stored")
        tensors[path] = value.detach().cpu().clone().contiguous()
        return _MARK + path
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            odd = next(key for key in value if not isinstance(key, str))
            raise TypeError(f"{path or 'the state'} has the key {odd!r}, which is no text")
        return {key: _split(item, f"{path}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_split(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, str) and value.startswith(_MARK):
        raise TypeError(f"{path}: text may not begin with {_MARK!r}")
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"{path} is a {type(value).__name__}, which cannot be stored")


def _join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _join(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_join(item, tensors) for item in value]
    if isinstance(value, str) and value.startswith(_MARK):
        name = value.removeprefix(_MARK)
        if name not in tensors:
            raise ValueError(f"{TENSORS_NAME} lacks {name!r}")
        return tensors[name]
    return value
