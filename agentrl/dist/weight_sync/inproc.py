"""Weights from trainer to engine within one process."""

from __future__ import annotations

import asyncio
import math
import time

import torch

from agentrl.dist.engine import TrainEngine
from agentrl.errors import EngineError
from agentrl.rollout.engine import RolloutEngine
from agentrl.weights.checksum import StreamSums
from agentrl.weights.push import WeightSink
from agentrl.weights.served import ServedWeights, WeightSpec, refuse_other_weights


class InprocWeightSync:
    """Hands tensors over and checks that what is served afterwards is what was trained.

    Args:
        timeout_s: for one sync, unfinished requests included; ``weight_sync.timeout_s``.
    """

    def __init__(self, *, timeout_s: float = 600.0) -> None:
        self._timeout_s = timeout_s

    async def publish(
        self, train_engine: TrainEngine, rollout_engine: RolloutEngine, version: int
    ) -> dict[str, float]:
        """Make ``rollout_engine`` sample from the weights of ``train_engine``.

        Waits until the engine has no unfinished request.

        Returns:
            ``weight_sync/{seconds,bytes,checksum_ok}``.

        Raises:
            EngineError: the engine refused the weights, serves others than were sent, says that
                they are of another version, or has not loaded them in time.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._publish(train_engine, rollout_engine, version)
        except TimeoutError:
            raise EngineError(
                f"the engine does not sample version {version} after weight_sync.timeout_s="
                f"{self._timeout_s:g} s: requests are unfinished, or it hangs; raise it, or lower "
                "rollout.max_turn_tokens"
            ) from None

    async def _publish(
        self, train_engine: TrainEngine, rollout_engine: RolloutEngine, version: int
    ) -> dict[str, float]:
        start = time.perf_counter()
        specs = rollout_engine.weight_specs()
        params = train_engine.export_params()
        if isinstance(rollout_engine, WeightSink) and rollout_engine.num_receivers:
            # Sums are taken where buckets are packed, and compared with the engine's there.
            await rollout_engine.update_weights(params, version)
        else:
            sums = StreamSums({spec.name: spec.dtype for spec in specs})
            served = await rollout_engine.update_weights(sums.watch(params), version)
            sent = ServedWeights(version=version, sums=sums.result())
            refuse_other_weights(sent, served, where="the engine")
        return {
            "weight_sync/seconds": time.perf_counter() - start,
            "weight_sync/bytes": float(sum(map(_num_bytes, specs))),
            "weight_sync/checksum_ok": 1.0,
        }


def _num_bytes(spec: WeightSpec) -> int:
    return math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize
