"""Weights from trainer to engine within one process."""

from __future__ import annotations

import time

from agentrl.dist.engine import TrainEngine
from agentrl.rollout.engine import RolloutEngine
from agentrl.weights.checksum import StreamSums
from agentrl.weights.served import ServedWeights, refuse_other_weights


class InprocWeightSync:
    """Hands tensors over and checks that what is served afterwards is what was trained."""

    async def publish(
        self, train_engine: TrainEngine, rollout_engine: RolloutEngine, version: int
    ) -> dict[str, float]:
        """Make ``rollout_engine`` sample from the weights of ``train_engine``.

        Waits until the engine has no unfinished request.

        Returns:
            ``weight_sync/{seconds,bytes,checksum_ok}``.

        Raises:
            EngineError: the engine refused the weights, serves others than were sent, or says
                that they are of another version.
        """
        start = time.perf_counter()
        sums = StreamSums({spec.name: spec.dtype for spec in rollout_engine.weight_specs()})
        params = sums.watch(train_engine.export_params())
        served = await rollout_engine.update_weights(params, version)
        sent = ServedWeights(version=version, sums=sums.result())
        refuse_other_weights(sent, served, where="the engine")
        return {
            "weight_sync/seconds": time.perf_counter() - start,
            "weight_sync/bytes": float(sums.num_bytes),
            "weight_sync/checksum_ok": 1.0,
        }
