"""Environments for tests: a friendly one, and one for every way to misbehave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.env.base import Env, Observation
from agentrl.types import Action, Task


class EchoEnv(Env):
    """Repeats what the model said, and pays the last turn if it said ``word``.

    Args:
        num_turns: after which the episode terminates.
        word: what to say for a reward of 1.
        tools: names or paths of tools that the model may call.
        num_tasks: per split.
    """

    def __init__(
        self,
        num_turns: int = 1,
        word: str = "yes",
        tools: Sequence[str] = (),
        num_tasks: int = 4,
    ) -> None:
        self.tools = tuple(tools)
        self._num_turns = num_turns
        self._word = word
        self._num_tasks = num_tasks
        self._turn = 0

    def tasks(self, split: str) -> Sequence[Task]:
        """Return ``num_tasks`` tasks that differ in their id only."""
        return [Task(id=f"{split}-{i}", data={"word": self._word}) for i in range(self._num_tasks)]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Ask for the word."""
        task = self.pick_task(seed, options)
        self._turn = 0
        return f"Say {task.data.get('word', self._word)}.", {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Echo the content; pay 1.0 in the last turn if it is the word."""
        self._turn += 1
        done = self._turn >= self._num_turns
        reward = float(done and action.content.strip() == self._word)
        return f"You said: {action.content}", reward, done, False, {}

    def anchor(self) -> str | None:
        """Return the number of the turn: the only state there is."""
        return f"turn {self._turn}"

    def snapshot(self) -> int:
        """Return the number of the turn."""
        return self._turn

    def restore(self, state: int) -> None:
        """Go on from a snapshot."""
        self._turn = state


class MisbehavingEnv(EchoEnv):
    """An :class:`EchoEnv` that does what ``where`` says instead, from turn ``turn`` on.

    Args:
        where: ``reset``, ``step`` or ``close``.
        what: called there; its value is returned as the environment's answer.
        turn: the first step that misbehaves.
    """

    def __init__(
        self, where: str = "step", what: Callable[[], Any] | None = None, turn: int = 0
    ) -> None:
        super().__init__(num_turns=4)
        self._where = where
        self._what = what or raises
        self._from_turn = turn

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Reset, or misbehave."""
        if self._where == "reset":
            return self._what()
        return super().reset(seed=seed, options=options)

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Step, or misbehave."""
        if self._where == "step" and self._turn >= self._from_turn:
            return self._what()
        return super().step(action)

    def close(self) -> None:
        """Close, or misbehave."""
        if self._where == "close":
            self._what()


def raises() -> Any:
    """Raise as a bug would."""
    raise ValueError("this environment is broken")


def hangs() -> Any:
    """Never return (an hour is never for a test; the thread is a daemon)."""
    threading.Event().wait(3600.0)


def pays(reward: Any) -> Callable[[], Any]:
    """Return a step that pays ``reward``, whatever that is."""
    return lambda: ("again", reward, False, False, {})
