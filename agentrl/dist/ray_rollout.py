"""Rollout workers as Ray actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from agentrl.dist.rollout_worker import OpenHost, ProcessSetup, RolloutWorker
from agentrl.dist.weight_sync.place import Target
from agentrl.dist.weight_sync.shipment import Shipment
from agentrl.errors import AgentRLError, WorkerError, WorkerLost
from agentrl.rollout.tasks import Dispatch
from agentrl.types import TrajectoryGroup
from agentrl.weights.channels.base import Address
from agentrl.weights.plan import BucketPlan
from agentrl.weights.served import ServedWeights

CLOSE_TIMEOUT_S = 30.0
"""For a worker to close environments, tools and sandboxes before its process is ended."""
_GONE = (ActorDiedError, ActorUnavailableError, ObjectLostError, WorkerCrashedError)
_SPARE_CALLS = 16
"""Calls beside groups that an actor takes at once: loading, closing."""


@dataclass(slots=True, frozen=True, kw_only=True)
class RolloutResources:
    """What Ray reserves for one rollout worker, and how much it plays."""

    cpus: float
    gpus: float
    max_groups: int


def ray_spawner(
    open_host: OpenHost, setup: ProcessSetup, resources: RolloutResources
) -> Callable[[int], RayRolloutHandle]:
    """Return what starts rollout workers on the cluster this process is connected to.

    Args:
        open_host: called in each worker's process; stored once for all of them.
        setup: what their processes take over from this one.
    """
    stored = ray.put(open_host)
    # Copied by Ray to every node: there the driver's own directory need not exist.
    copied = "working_dir" in (ray.get_runtime_context().runtime_env or {})
    actor = ray.remote(RolloutWorker).options(
        num_cpus=resources.cpus,
        num_gpus=resources.gpus,
        max_concurrency=resources.max_groups + _SPARE_CALLS,
        scheduling_strategy="SPREAD",
    )

    def spawn(index: int) -> RayRolloutHandle:
        return RayRolloutHandle(
            actor.remote(stored, setup, index=index, may_stay=copied), index=index
        )

    return spawn


class RayRolloutHandle:
    """A :class:`~agentrl.dist.rollout_handle.RolloutHandle` to an actor.

    Raises:
        AgentRLError: what the worker raised; a note on it holds the worker's traceback.
        WorkerError: the worker raised another error.
        WorkerLost: its process is gone.
    """

    def __init__(self, actor: Any, *, index: int) -> None:
        self._actor = actor
        self._label = f"rollout worker {index}"
        self._closed = False

    async def start(self) -> dict[str, str]:
        """Open the worker."""
        return await self._call(self._actor.start.remote())

    async def run_group(self, purpose: str, dispatch: Dispatch) -> TrajectoryGroup:
        """Sample one prompt; arrays of a large group lie in the object store, read-only."""
        return await self._call(self._actor.run_group.remote(purpose, dispatch))

    async def cut(self, purpose: str, dispatch: Dispatch) -> None:
        """Have the episodes of a prompt end there with what they have."""
        await self._call(self._actor.cut.remote(purpose, dispatch))

    async def metrics(self) -> dict[str, float]:
        """Say what its engine has done."""
        return await self._call(self._actor.metrics.remote())

    async def load(self, shipment: Shipment) -> ServedWeights:
        """Fetch the buckets to the worker's node and load them."""
        # As arguments of their own they are there, and mapped, before the method runs.
        return await self._call(self._actor.load.remote(shipment.version, *shipment.buckets))

    async def weight_target(self) -> Target:
        """Say where the worker is and what it serves."""
        return await self._call(self._actor.weight_target.remote())

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """Open the receiving side of a direct channel."""
        await self._call(self._actor.connect.remote(plan, address))

    async def begin_update(self) -> None:
        """Let no request begin until the update is finished."""
        await self._call(self._actor.begin_update.remote())

    async def load_bucket(self, index: int) -> None:
        """Load a bucket from the direct channel."""
        await self._call(self._actor.load_bucket.remote(index))

    async def finish_update(self, version: int) -> ServedWeights:
        """Say what is served."""
        return await self._call(self._actor.finish_update.remote(version))

    async def give_up_update(self, reason: str) -> None:
        """Tell that no more of an update comes."""
        await self._call(self._actor.give_up_update.remote(reason))

    async def sleep(self, level: int = 1) -> None:
        """Give the device away."""
        await self._call(self._actor.sleep.remote(level))

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        await self._call(self._actor.wake.remote())

    async def close(self) -> None:
        """Close what the worker holds, then end its process, closed or not."""
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._call(self._actor.close.remote())
        except (AgentRLError, TimeoutError):
            pass  # it is gone, or hangs: what follows ends it
        finally:
            ray.kill(self._actor, no_restart=True)

    async def _call(self, reference: Any) -> Any:
        answer = asyncio.wrap_future(reference.future())
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            ray.cancel(reference)  # episodes close environments and tools under their own deadlines
            await asyncio.wait([answer], timeout=CLOSE_TIMEOUT_S)
            if answer.done() and not answer.cancelled():
                answer.exception()  # has been looked at
            raise
        except _GONE as error:
            raise WorkerLost(f"{self._label}: its process is gone ({_line(error)})") from error
        except RayTaskError as error:
            raise self._raised(error) from None
        except RayError as error:
            raise WorkerError(f"{self._label}: {type(error).__name__}: {_line(error)}") from error

    def _raised(self, error: RayTaskError) -> AgentRLError:
        cause = error.cause
        text = str(error)  # with the traceback; what Ray raises has it in no attribute
        if not isinstance(cause, AgentRLError):
            return WorkerError(f"{self._label} raised {text}")
        cause.add_note(f"in {self._label}:\n{text}")
        return cause


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
