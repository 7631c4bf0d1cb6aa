"""A hosted environment as the agent loop sees it: coroutines, each with a deadline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from agentrl.env.base import Episode, Observation
from agentrl.types import Action, Score


class HostedRubric(Protocol):
    """The rubric of a hosted environment."""

    async def score(self, episode: Episode) -> Score:
        """Grade an episode.

        Raises:
            RewardError: the rubric raised, or returned no Score with finite numbers.
            RewardTimeout: it did not return within ``rollout.reward_timeout_s``.
            SandboxError, InfrastructureError: ours; the trajectory fails and is excluded.
        """
        ...


class Hosted(Protocol):
    """An environment as the agent loop sees it. Every method has a deadline."""

    env_id: str
    tools: tuple[str, ...]
    artifacts: tuple[str, ...]
    rubric: HostedRubric | None

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode.

        Raises:
            EnvError: it raised or returned a wrong type; ``EnvTimeout``: no answer in time.
            InfrastructureError: another environment took its thread or process down.
            ThreadLeakError: too many threads hang for good: stop the run.
        """
        ...

    async def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Answer one turn. Raises as :meth:`reset`, and RewardError for a bad reward."""
        ...

    async def tool_state(self, tool: str) -> Mapping[str, Any]:
        """Return what ``tool`` needs to know of the task. Raises as :meth:`reset`."""
        ...

    async def anchor(self) -> str | None:
        """Return the key of the present state."""
        ...

    async def snapshot(self) -> bytes:
        """Return the present state, pickled. Raises as :meth:`reset`.

        An environment that has no ``snapshot``, or whose state cannot be pickled, is an EnvError.
        """
        ...

    async def restore(self, state: bytes) -> None:
        """Go on from ``state``, after a reset with its task and seed. Raises as :meth:`reset`."""
        ...

    async def close(self) -> None:
        """Close the environment; never raises for what the environment does."""
        ...
