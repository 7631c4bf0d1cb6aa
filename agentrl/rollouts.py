"""What samples, as the driver of a run sees it, and the one that lives in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from agentrl.agent.renderer import Renderer
from agentrl.config.schema import Config
from agentrl.dist.engine import TrainEngine
from agentrl.dist.weight_sync.inproc import InprocWeightSync
from agentrl.model.load import LoadedModel
from agentrl.plan import Plan
from agentrl.playground import GroupRunners, Playground, open_playground
from agentrl.rollout.producer import CutGroup, RunGroup
from agentrl.train.parts import Placement, Weights

FitToModel = Callable[[Renderer], None]
"""Told of the tokenizer as soon as there is one; refuses what does not fit to it."""


class Rollouts(Protocol):
    """Plays groups, somewhere, with the policy that was published last."""

    @property
    def model(self) -> LoadedModel:
        """What the run starts from: the training engine's to change."""
        ...

    async def opened(self) -> None:
        """Return once everything that plays is open.

        Raises:
            AgentRLError: whatever of it cannot be used.
        """
        ...

    def runner(self, purpose: str) -> RunGroup:
        """Return what samples a prompt for a purpose of the plan."""
        ...

    def cutter(self, purpose: str) -> CutGroup:
        """Return what has the episodes of such a prompt end with what they have."""
        ...

    def weights(self, actor: TrainEngine) -> Weights:
        """Return what carries the policy of ``actor`` here."""
        ...

    def placement(self, actor: TrainEngine) -> Placement:
        """Return who owns the device when."""
        ...


@dataclass(slots=True, frozen=True)
class LocalRollouts:
    """One engine, in this process."""

    ground: Playground
    config: Config
    runners: Mapping[str, GroupRunners]
    """By purpose."""

    @property
    def model(self) -> LoadedModel:
        """What the run starts from."""
        return self.ground.model

    async def opened(self) -> None:
        """Return: it is."""

    def runner(self, purpose: str) -> RunGroup:
        """See :class:`Rollouts`."""
        return self.runners[purpose]

    def cutter(self, purpose: str) -> CutGroup:
        """See :class:`Rollouts`."""
        return self.runners[purpose].cut

    def weights(self, actor: TrainEngine) -> Weights:
        """See :class:`Rollouts`."""
        return _LocalWeights(self.ground, actor, timeout_s=self.config.weight_sync.timeout_s)

    def placement(self, actor: TrainEngine) -> Placement:
        """See :class:`Rollouts`."""
        level = self.config.rollout.sleep_level
        return TakesTurns(self.ground.engine, actor, level) if level else OneOwner()


class Sleeper(Protocol):
    """Gives its device away and takes it back."""

    async def sleep(self, level: int = 1) -> None:
        """Free what ``level`` says; see ``rollout.sleep_level``."""
        ...

    async def wake(self) -> None:
        """Undo it; weights that were given up are whatever the memory holds."""
        ...


class TakesTurns:
    """Engines sleep while training, on the same device, has it.

    Args:
        sleeper: the engines.
        actor: leaves the device between updates, as far as ``actor.offload`` says.
        level: what the engines give up. At 2 they wake with no weights worth the name: the next
            thing that happens to them is a weight sync.
    """

    def __init__(self, sleeper: Sleeper, actor: TrainEngine, level: int) -> None:
        self._sleeper = sleeper
        self._actor = actor
        self._level = level

    @asynccontextmanager
    async def _training(self) -> AsyncIterator[None]:
        await self._sleeper.sleep(self._level)
        await asyncio.to_thread(self._actor.onload)
        yield  # an error ends the run: nobody has to wake up after it
        await asyncio.to_thread(self._actor.offload)
        await self._sleeper.wake()

    def training(self) -> AbstractAsyncContextManager[None]:
        """Hold the device for an update."""
        return self._training()


class OneOwner:
    """Training and sampling do not share a device, or share all of it at all times."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """Do nothing: neither has to give anything up."""
        return nullcontext()


class _LocalWeights:
    """Publishes one training engine to the engine of a playground."""

    def __init__(self, ground: Playground, actor: TrainEngine, *, timeout_s: float) -> None:
        self._ground = ground
        self._actor = actor
        self._sync = InprocWeightSync(timeout_s=timeout_s)

    async def publish(self, *, version: int) -> dict[str, Any]:
        """Copy and verify; see :class:`InprocWeightSync`. Returns the engines' own figures too."""
        policy, engine = self._ground.policy, self._ground.engine
        policy.export, policy.version = self._actor.export_params, version
        found = dict(await self._sync.publish(self._actor, engine, version))
        return found | engine.metrics()


@asynccontextmanager
async def open_local(config: Config, plan: Plan, fit: FitToModel) -> AsyncIterator[LocalRollouts]:
    """Open everything that plays in this process.

    Raises:
        AgentRLError: whatever of it cannot be used.
    """
    async with open_playground(config, plan.environments, examples=plan.examples) as ground:
        fit(ground.renderer)
        runners = {name: ground.groups(config, groups) for name, groups in plan.groups.items()}
        yield LocalRollouts(ground, config, runners)
