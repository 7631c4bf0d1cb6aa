"""A worker of vLLM in which a parameter changes behind our back, for a test of checksums."""

from __future__ import annotations

import os
from pathlib import Path

from agentrl.rollout.engines.vllm_worker import WorkerExtension


class SpoilingExtension(WorkerExtension):
    """Changes one bit of the tensor whose name a file holds, once, before the sums are taken."""

    def agentrl_sums(self) -> dict[str, int]:
        """See the base class."""
        order = Path(os.environ["AGENTRL_TEST_SPOIL"])
        if order.exists():
            view = self._agentrl_placements[order.read_text()][0].view
            order.unlink()
            view.view(-1)[-1] *= 1.0 + 2.0**-20
        return super().agentrl_sums()
