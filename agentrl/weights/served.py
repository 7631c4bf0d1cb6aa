"""What weights are served, and the refusal of any others than were sent. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from agentrl.errors import EngineError


@dataclass(slots=True, frozen=True, kw_only=True)
class WeightSpec:
    """A tensor as an engine serves it."""

    name: str
    """Of the model's parameter in ``transformers``; tied tensors once."""
    shape: tuple[int, ...]
    """Of the whole tensor, also where an engine's ranks hold slices of it."""
    dtype: str
    """Name of a torch dtype."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ServedWeights:
    """What an engine says that it samples from."""

    version: int
    sums: Mapping[str, int]
    """Name -> :func:`~agentrl.weights.checksum.checksum` of the tensor as it is served."""


class SentWeights(Protocol):
    """Weights of one version that were sent."""

    @property
    def version(self) -> int:
        """Of the weights."""
        ...

    @property
    def sums(self) -> Mapping[str, int]:
        """Name -> checksum of the tensor in the dtype that is served."""
        ...


def differences(sent: Mapping[str, int], served: Mapping[str, int]) -> list[str]:
    """Return the names that one side lacks or has with another checksum, sorted."""
    return sorted(
        name for name in sent.keys() | served.keys() if sent.get(name) != served.get(name)
    )


def refuse_other_weights(sent: SentWeights, served: ServedWeights, *, where: str) -> None:
    """Refuse to sample from anything but what was sent.

    Args:
        where: names the engine.

    Raises:
        EngineError: its weights are of another version, or differ.
    """
    if served.version != sent.version:
        raise EngineError(
            f"stale policy: after publishing version {sent.version} {where} says it samples "
            f"version {served.version}"
        )
    if wrong := differences(sent.sums, served.sums):
        raise EngineError(
            f"scrambled policy: after publishing version {sent.version}, {len(wrong)} of "
            f"{len(sent.sums)} tensors are served by {where} otherwise than they were sent, the "
            f"first {wrong[0]!r}; sampling from them would train another policy"
        )
