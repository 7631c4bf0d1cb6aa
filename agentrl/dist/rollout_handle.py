"""What the driver of a run asks of a rollout worker, wherever that is."""

from __future__ import annotations

from typing import Protocol

from agentrl.dist.weight_sync.place import Target
from agentrl.dist.weight_sync.shipment import Shipment
from agentrl.rollout.tasks import Dispatch
from agentrl.types import TrajectoryGroup
from agentrl.weights.channels.base import Address
from agentrl.weights.plan import BucketPlan
from agentrl.weights.served import ServedWeights


class RolloutHandle(Protocol):
    """A rollout worker somewhere else. Methods raise WorkerLost where its process is gone."""

    async def start(self) -> dict[str, str]:
        """See :meth:`agentrl.dist.rollout_worker.RolloutWorker.start`."""
        ...

    async def run_group(self, purpose: str, dispatch: Dispatch) -> TrajectoryGroup:
        """Sample one prompt; cancelling ends the episodes there too."""
        ...

    async def cut(self, purpose: str, dispatch: Dispatch) -> None:
        """Have the episodes of a prompt end with what they have; ``run_group`` returns it."""
        ...

    async def metrics(self) -> dict[str, float]:
        """Return what its engine has done since it was opened."""
        ...

    async def load(self, shipment: Shipment) -> ServedWeights:
        """Take over weights, once no request is unfinished."""
        ...

    async def weight_target(self) -> Target:
        """See :class:`~agentrl.dist.weight_sync.direct.RemoteSink`, as for what follows."""
        ...

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """Open the receiving side of a direct channel."""
        ...

    async def begin_update(self) -> None:
        """Let no request begin until the update is finished."""
        ...

    async def load_bucket(self, index: int) -> None:
        """Load a bucket from the direct channel."""
        ...

    async def finish_update(self, version: int) -> ServedWeights:
        """Say what is served."""
        ...

    async def give_up_update(self, reason: str) -> None:
        """Hear that no more of an update comes."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Give the device away; see ``rollout.sleep_level``."""
        ...

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        ...

    async def close(self) -> None:
        """Close what it holds and end the process. Idempotent; raises nothing."""
        ...
