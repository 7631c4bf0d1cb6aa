from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from agentrl.dist.config import EngineConfig
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.dist.weight_sync.inproc import InprocWeightSync
from agentrl.errors import EngineError
from agentrl.weights.checksum import checksums
from agentrl.weights.served import ServedWeights, WeightSpec

Make = Callable[..., Any]
Damage = Callable[[dict[str, torch.Tensor]], None]


class CopyingEngine:
    """Serves a copy in its own dtype; ``damage`` is what goes wrong on the way."""

    def __init__(self, dtype: torch.dtype = torch.float32, damage: Damage | None = None) -> None:
        self.policy_version = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.forget_version = False
        self._dtype = dtype
        self._damage = damage

    async def update_weights(
        self, params: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> ServedWeights:
        self.weights = {name: value.to(self._dtype, copy=True) for name, value in params}
        if self._damage is not None:
            self._damage(self.weights)
        if not self.forget_version:
            self.policy_version = version
        return ServedWeights(version=self.policy_version, sums=checksums(self.weights.items()))

    def weight_specs(self) -> list[WeightSpec]:
        dtype = str(self._dtype).removeprefix("torch.")
        return [
            WeightSpec(name=name, shape=shape, dtype=dtype) for name, shape in self.shapes.items()
        ]


def _publish(model: Any, engine: CopyingEngine, version: int = 3) -> dict[str, float]:
    engine.shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    trainer = FSDPEngine(model, None, EngineConfig(), ranks=Ranks.single("cpu"))
    return asyncio.run(InprocWeightSync().publish(trainer, engine, version))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_serves_what_was_trained(tiny_model: Make, dtype: torch.dtype) -> None:
    model, engine = tiny_model(), CopyingEngine(dtype)
    metrics = _publish(model, engine)
    num_params = sum(value.numel() for value in model.parameters())
    assert metrics["weight_sync/checksum_ok"] == 1.0
    assert metrics["weight_sync/bytes"] == num_params * dtype.itemsize
    assert metrics["weight_sync/seconds"] > 0
    assert engine.policy_version == 3
    for name, value in model.named_parameters():
        assert torch.equal(engine.weights[name], value.detach().to(dtype))


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


def _swap_rows(weights: dict[str, torch.Tensor]) -> None:
    weights[EMBEDDING][[0, 1]] = weights[EMBEDDING][[1, 0]]


def _drop(weights: dict[str, torch.Tensor]) -> None:
    del weights[NORM]


def _one_bit(weights: dict[str, torch.Tensor]) -> None:
    weights[NORM].view(torch.int32)[5] ^= 1


@pytest.mark.parametrize(
    ("damage", "name"), [(_swap_rows, EMBEDDING), (_drop, NORM), (_one_bit, NORM)]
)
def test_scrambled_weights_are_an_error_that_names_the_tensor(
    tiny_model: Make, damage: Damage, name: str
) -> None:
    with pytest.raises(EngineError, match=f"scrambled.*{name}"):
        _publish(tiny_model(), CopyingEngine(damage=damage))


def test_stale_weights_are_an_error(tiny_model: Make) -> None:
    engine = CopyingEngine()
    engine.forget_version = True
    with pytest.raises(EngineError, match="stale"):
        _publish(tiny_model(), engine)


def test_an_engine_that_hangs_ends_the_sync_with_the_setting_to_raise(tiny_model: Make) -> None:
    class Hanging(CopyingEngine):
        async def update_weights(self, params: Any, version: int) -> ServedWeights:
            await asyncio.Event().wait()
            raise AssertionError

    trainer = FSDPEngine(tiny_model(), None, EngineConfig(), ranks=Ranks.single("cpu"))
    sync = InprocWeightSync(timeout_s=0.01)
    with pytest.raises(EngineError, match="version 7 after weight_sync.timeout_s=0.01 s"):
        asyncio.run(sync.publish(trainer, Hanging(torch.float32), 7))  # type: ignore[arg-type]
