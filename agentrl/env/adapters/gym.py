"""An environment, synchronous or not, as a plain ``gymnasium.Env``."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import gymnasium

from agentrl.env.base import AsyncEnv, Env
from agentrl.env.spaces import ActionSpace, ObservationSpace
from agentrl.types import Action


def as_gymnasium(env: Env | AsyncEnv) -> gymnasium.Env[Any, Any]:
    """Wrap ``env`` so that gymnasium's tools, ``check_env`` among them, accept it.

    Actions may be :class:`~agentrl.types.Action` or plain text. Without a task in the options,
    ``reset`` samples one of the train split with its seed. Tools are not run: an action with tool
    calls must bring their results.
    """
    return _GymnasiumEnv(env)


class _GymnasiumEnv(gymnasium.Env[Any, Any]):
    metadata = {"render_modes": []}
    observation_space = ObservationSpace()
    action_space = ActionSpace()

    def __init__(self, env: Env | AsyncEnv) -> None:
        self.wrapped = env
        self._closed = False
        self._runner = asyncio.Runner() if inspect.iscoroutinefunction(env.step) else None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. Without a seed, one is drawn from ``np_random``."""
        super().reset(seed=seed)
        episode_seed = int(self.np_random.integers(2**62))
        return self._call(self.wrapped.reset(seed=episode_seed, options=options))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one turn."""
        if isinstance(action, str):
            action = Action(text=action, content=action)
        observation, reward, terminated, truncated, info = self._call(self.wrapped.step(action))
        return observation, float(reward), terminated, truncated, info

    def close(self) -> None:
        """Close the environment and its event loop."""
        if self._closed:
            return
        self._closed = True
        self._call(self.wrapped.close())
        if self._runner is not None:
            self._runner.close()

    def _call(self, value: Any) -> Any:
        return value if self._runner is None else self._runner.run(value)
