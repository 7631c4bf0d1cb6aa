"""What a training engine saves: weights, optimizer, counters, torch's generators.

Tensors are named ``model/<name>`` and ``optimizer/<moment>/<parameter>``, whatever order the
optimizer keeps its parameters in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from agentrl.dist.sharded_state import (
    PendingFiles,
    StoredTensors,
    load_sharded,
    num_saved_ranks,
    read_values,
    save_sharded,
    stored_tensors,
)
from agentrl.errors import CheckpointError
from agentrl.seeding import derive_seed

MODEL_PREFIX = "model/"
_OPTIMIZER_PREFIX = "optimizer/"


@dataclass(slots=True, kw_only=True, frozen=True)
class TrainState:
    """The live parts of an engine that a checkpoint holds, as one rank sees them."""

    model: Mapping[str, Tensor]
    """What is trained, and persistent buffers, by the names that they are exported under."""
    parameters: Mapping[str, Tensor]
    """What the optimizer moves, by the same names."""
    optimizer: Optimizer
    rank: int = 0
    device: torch.device

    def save(self, directory: Path, counters: Mapping[str, int]) -> PendingFiles:
        """Write everything into ``directory``; returns once it is copied to host memory."""
        tensors = {MODEL_PREFIX + name: value for name, value in self.model.items()}
        scalars: dict[str, dict[str, float]] = {}
        for name, parameter in self.parameters.items():
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                if value.ndim:
                    tensors[f"{_OPTIMIZER_PREFIX}{kind}/{name}"] = value
                else:  # the count of steps, the same on every rank
                    scalars.setdefault(kind, {})[name] = float(value)
        values = {
            "counters": dict(counters),
            "optimizer": scalars,
            "rng": capture_torch_rng(self.device),
        }
        return save_sharded(directory, tensors, values, rank=self.rank)

    def load(self, directory: Path) -> dict[str, int]:
        """Undo :meth:`save` at any number of ranks; returns the counters.

        Raises:
            CheckpointError: the state belongs to another model, or is not complete.
        """
        moments = self._empty_moments(stored_tensors(directory))
        into = {MODEL_PREFIX + name: value for name, value in self.model.items()}
        for name, kinds in moments.items():
            into |= {f"{_OPTIMIZER_PREFIX}{kind}/{name}": value for kind, value in kinds.items()}
        values = _Values.of(read_values(directory, rank=self.rank), directory)
        scalars = [
            (self._parameter(name), kind, value) for name, kind, value in values.optimizer_scalars
        ]
        load_sharded(directory, into, rank=self.rank)
        self.optimizer.state.clear()
        for parameter, kind, value in scalars:
            scalar = torch.tensor(value, dtype=torch.float32, device=parameter.device)
            self.optimizer.state[parameter][kind] = scalar
        for name, kinds in moments.items():
            self.optimizer.state[self._parameter(name)].update(kinds)
        is_new = self.rank >= num_saved_ranks(directory)
        restore_torch_rng(values.rng, self.device, rank=self.rank if is_new else None)
        return values.counters

    def _empty_moments(self, stored: StoredTensors) -> dict[str, dict[str, Tensor]]:
        """Return tensors to read the optimizer's into: parameter -> moment -> tensor."""
        moments: dict[str, dict[str, Tensor]] = {}
        for key, facts in stored.items():
            if key.startswith(_OPTIMIZER_PREFIX):
                kind, name = key.removeprefix(_OPTIMIZER_PREFIX).split("/", 1)
                like = self._parameter(name).detach()
                empty = torch.zeros_like(like, dtype=facts.properties.dtype)
                moments.setdefault(name, {})[kind] = empty
        return moments

    def _parameter(self, name: str) -> Tensor:
        if name not in self.parameters:
            raise CheckpointError(
                f"the checkpoint belongs to another model: it holds the optimizer's state of "
                f"{name!r}, which this one does not train"
            )
        return self.parameters[name]


@dataclass(slots=True, kw_only=True, frozen=True)
class _Values:
    """What a rank saved beside its tensors, checked before anything is changed."""

    counters: dict[str, int]
    optimizer_scalars: list[tuple[str, str, float]]
    """Parameter, kind, value."""
    rng: dict[str, str]

    @classmethod
    def of(cls, found: Mapping[str, Any], directory: Path) -> _Values:
        """Read what :meth:`TrainState.save` wrote.

        Raises:
            CheckpointError: it did not write this.
        """
        try:
            values = cls(
                counters={name: int(value) for name, value in found["counters"].items()},
                optimizer_scalars=[
                    (name, kind, float(value))
                    for kind, by_name in found["optimizer"].items()
                    for name, value in by_name.items()
                ],
                rng=dict(found["rng"]),
            )
            for state in values.rng.values():
                _generator_state(state)
            torch.Generator().set_state(_generator_state(values.rng["cpu"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as e:
            raise CheckpointError(
                f"the values beside the tensors in {str(directory)!r} are not those of a training "
                f"engine ({type(e).__name__}: {e}): they are damaged, or of another version of "
                "agentrl; resume from another checkpoint"
            ) from e
        return values


def capture_torch_rng(device: torch.device) -> dict[str, str]:
    """Return the states of torch's generators, of the CPU and of ``device``, as hexadecimal."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {kind: bytes(state.numpy()).hex() for kind, state in states.items()}


def restore_torch_rng(
    state: Mapping[str, Any], device: torch.device, *, rank: int | None = None
) -> None:
    """Undo :func:`capture_torch_rng`.

    Args:
        rank: of a rank that had no state of its own: ``state`` is then another rank's, from which
            its own is derived.
    """
    if rank is not None:
        torch.manual_seed(derive_seed(state["cpu"], "rank", rank))  # of every device
        return
    torch.set_rng_state(_generator_state(state["cpu"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_generator_state(state["cuda"]), device)


def _generator_state(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
