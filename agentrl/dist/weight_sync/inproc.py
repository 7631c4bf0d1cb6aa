"""Weights from trainer to engine within one process."""

from __future__ import annotations

import time

from agentrl.dist.engine import TrainEngine
from agentrl.dist.weight_sync.checksum import checksums, differences
from agentrl.errors import EngineError
from agentrl.rollout.engine import RolloutEngine


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
        await rollout_engine.update_weights(train_engine.export_params(), version)
        if rollout_engine.policy_version != version:
            raise EngineError(
                f"stale policy: after publishing version {version} the engine says it samples "
                f"version {rollout_engine.policy_version}"
            )
        served, num_bytes = {}, 0
        dtypes = {}
        for name, value in rollout_engine.named_weights():
            dtypes[name] = value.dtype
            num_bytes += value.numel() * value.element_size()
            served |= checksums([(name, value)])
        sent = checksums(
            (name, value.to(dtypes.get(name, value.dtype)))
            for name, value in train_engine.export_params()
        )
        wrong = differences(sent, served)
        if wrong:
            raise EngineError(
                f"scrambled policy: after publishing version {version}, {len(wrong)} of "
                f"{len(sent)} tensors are served otherwise than they were sent, "
                f"the first {wrong[0]!r}; sampling from them would train another policy"
            )
        return {
            "weight_sync/seconds": time.perf_counter() - start,
            "weight_sync/bytes": float(num_bytes),
            "weight_sync/checksum_ok": 1.0,
        }
