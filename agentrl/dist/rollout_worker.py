"""A process that plays episodes: engine, environments, tools and sandboxes, behind one object.

:class:`RolloutWorker` is what runs inside an actor. It knows no Ray:
:mod:`agentrl.dist.ray_rollout` makes actors of it, :mod:`agentrl.dist.rollout_pool` chooses among
them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agentrl.dist.weight_sync.place import Place, Target, num_gpus
from agentrl.errors import ConfigError, EngineError, TrainingError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.tasks import Dispatch
from agentrl.types import TrajectoryGroup
from agentrl.weights.buckets import Bucket, unpack
from agentrl.weights.channels.base import Address
from agentrl.weights.collect import CollectingSink
from agentrl.weights.plan import BucketPlan
from agentrl.weights.push import WeightSink
from agentrl.weights.relay import RelaySink
from agentrl.weights.served import ServedWeights


class RolloutHost(Protocol):
    """What plays: an engine, and everything else that an episode needs."""

    @property
    def engine(self) -> RolloutEngine:
        """What is sampled."""
        ...

    async def run_group(self, purpose: str, dispatch: Dispatch) -> TrajectoryGroup:
        """Sample one prompt; failures inside are data.

        Args:
            purpose: ``train``, or the name of an evaluation.
        """
        ...

    async def cut(self, purpose: str, dispatch: Dispatch) -> None:
        """End the episodes of a prompt with what they have."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return what the engine has done since it was opened, as flat numbers."""
        ...


OpenHost = Callable[[int], AbstractAsyncContextManager[RolloutHost]]
"""Number of the worker -> what plays. Can be pickled: it is called in the worker's process."""


_PASSED_ON = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUBLAS_", "HF_", "TOKENIZERS_", "AGENTRL_")
"""Prefixes of the driver's environment variables that workers get."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ProcessSetup:
    """What a worker's process takes over from the driver, so that names mean the same there."""

    working_dir: str
    """Relative paths (``./env.py:Env``, data files, tool specs) start here."""
    import_paths: tuple[str, ...]
    num_threads: int = 0
    """Of torch; 0 leaves what the process was started with."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set before anything is imported."""

    @classmethod
    def of_this_process(cls, *, num_threads: int = 0) -> ProcessSetup:
        """Describe the driver."""
        return cls(
            working_dir=os.getcwd(),
            import_paths=tuple(os.path.abspath(path) for path in sys.path),
            num_threads=num_threads,
            environment={k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)},
        )

    def apply(self, *, may_stay: bool = False) -> None:
        """Make this process resolve names as the driver does.

        Args:
            may_stay: keep the present working directory where the driver's does not exist here.

        Raises:
            ConfigError: the driver's working directory does not exist on this machine.
        """
        os.environ.update(self.environment)
        if Path(self.working_dir).is_dir():
            os.chdir(self.working_dir)
        elif not may_stay:
            raise ConfigError(
                f"the working directory {self.working_dir!r} of the driver does not exist on "
                f"{socket.gethostname()}: put it on a file system that all nodes mount, or let Ray "
                "copy it with cluster.runtime_env.working_dir=."
            )
        known = set(sys.path)
        sys.path.extend(path for path in self.import_paths if path not in known)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if self.num_threads:
            import torch

            torch.set_num_threads(self.num_threads)


class RolloutWorker:
    """Plays groups with the weights it was given last.

    Args:
        open_host: opens what plays, in this process.
        setup: applied before anything else is imported.
        index: number of the worker.
        may_stay: see :meth:`ProcessSetup.apply`.
    """

    def __init__(
        self, open_host: OpenHost, setup: ProcessSetup, *, index: int = 0, may_stay: bool = False
    ) -> None:
        setup.apply(may_stay=may_stay)
        self._open_host = open_host
        self._index = index
        self._host: RolloutHost | None = None
        self._serving: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        self._has_weights = False
        self._sink: WeightSink | None = None
        self._relay: RelaySink | None = None

    async def start(self) -> dict[str, str]:
        """Open everything; returns name -> dtype of the weights that are served.

        Raises:
            AgentRLError: whatever of it cannot be used.
        """
        ready: asyncio.Future[RolloutHost] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(ready), name="rollout-host")
        self._host = await ready
        return {spec.name: spec.dtype for spec in self._host.engine.weight_specs()}

    async def _serve(self, ready: asyncio.Future[RolloutHost]) -> None:
        """Hold the host open: one task enters and leaves it."""
        try:
            async with self._open_host(self._index) as host:
                ready.set_result(host)
                await self._leave.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def run_group(self, purpose: str, dispatch: Dispatch) -> TrajectoryGroup:
        """Sample one prompt.

        Raises:
            EngineError: no weights have been loaded yet.
            AgentRLError: what must end the run; failures of episodes are data.
        """
        if not self._has_weights:
            raise EngineError("a rollout worker was asked to sample before it had any weights")
        try:
            return await self._started().run_group(purpose, dispatch)
        except BaseExceptionGroup as error:  # of a task group: the first one says what happened
            raise _first(error) from error
        except (SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                raise
            raise TrainingError(  # an exit would take the process, and its other groups, along
                f"the group of task {dispatch.task.id!r} ended with "
                f"{type(error).__name__}({error}), which nothing asked for: look for sys.exit or a "
                "cancellation in the environment or reward"
            ) from error

    async def cut(self, purpose: str, dispatch: Dispatch) -> None:
        """End the episodes of a prompt with what they have; :meth:`run_group` returns that."""
        await self._started().cut(purpose, dispatch)

    async def metrics(self) -> dict[str, float]:
        """Return what the engine has done since this process opened it."""
        return self._started().metrics()

    async def load(self, version: int, *buckets: Bucket) -> ServedWeights:
        """Take over weights in place, once no request is unfinished, and say what is served.

        Raises:
            EngineError: a tensor is missing, unknown, of another shape, or not finite.
        """
        served = await self._started().engine.update_weights(unpack(buckets), version)
        self._has_weights = True
        return served

    async def weight_target(self) -> Target:
        """Say where this process is and what weights it takes."""
        sink = self._engine_sink()
        return Target(
            place=Place.of_this_process(on_gpu=num_gpus() > 0),
            num_receivers=sink.num_receivers,
            num_gpus=num_gpus(),
            specs=tuple(sink.weight_specs()),
        )

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """See :class:`~agentrl.weights.push.WeightSink`, as for what follows."""
        before, self._relay = self._relay, None
        if (await self.weight_target()).relays(address.transport):
            self._relay = before or RelaySink(self._engine_sink(), device=self._device())
        await self._weight_sink().connect(plan, address)
        if before is not None and self._relay is None:  # engines map its memory until now
            before.close()

    async def begin_update(self) -> None:
        """Let no request begin until the update is finished."""
        await self._weight_sink().begin_update()

    async def load_bucket(self, index: int) -> None:
        """Load a bucket that a training rank has sent."""
        await self._weight_sink().load_bucket(index)

    async def finish_update(self, version: int) -> ServedWeights:
        """Serve what was loaded, and say what it is."""
        served = await self._weight_sink().finish_update(version)
        self._has_weights = True
        return served

    async def give_up_update(self, reason: str) -> None:
        """Hear that no more of an update comes."""
        await self._weight_sink().give_up_update(reason)

    def _weight_sink(self) -> WeightSink:
        return self._relay or self._engine_sink()

    def _engine_sink(self) -> WeightSink:
        if self._sink is None:
            engine = self._started().engine
            if isinstance(engine, WeightSink) and engine.num_receivers:
                self._sink = engine
            else:
                self._sink = CollectingSink(engine, device=self._device())
        return self._sink

    def _device(self) -> str:
        return "cuda:0" if num_gpus() else "cpu"

    async def sleep(self, level: int = 1) -> None:
        """Give the device to the training engine."""
        await self._started().engine.sleep(level)

    async def wake(self) -> None:
        """Undo :meth:`sleep`."""
        await self._started().engine.wake()

    async def close(self) -> None:
        """Close environments, tools, sandboxes and the engine. Idempotent."""
        self._leave.set()
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        if self._relay is not None:  # engines that map its memory are gone
            self._relay.close()

    def _started(self) -> RolloutHost:
        if self._host is None:
            raise EngineError("the rollout worker is not started; await start() first")
        return self._host


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
