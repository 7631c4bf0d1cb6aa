"""Environments with snapshots: a faithful one, and some that are not."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.env.base import Demonstration, Env
from agentrl.types import Action, Task


@dataclass
class State:
    """A class of the user's own, mutable inside."""

    said: list[str] = field(default_factory=list)
    rng: Any = None


class Faithful(Env):
    """Draws a number every turn, and remembers what was said."""

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(id=f"{split}-{i}", data={"split": split, "n": i}) for i in range(2)]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.task = self.pick_task(seed, options)
        self.rng = random.Random(seed)
        self.state = State()
        return f"Go on, {self.task.id}", {}

    def step(self, action: Action) -> Any:
        self.state.said.append(action.text)
        drawn = self.rng.randrange(10**6)
        return f"{self.state.said} {drawn}", float(drawn), len(self.state.said) == 4, False, {}

    def anchor(self) -> str:
        return " ".join(self.state.said)

    def snapshot(self) -> Any:
        self.state.rng = self.rng.getstate()
        return self.state

    def restore(self, state: State) -> None:
        self.state = state
        self.rng.setstate(state.rng)

    def demonstrations(self, split: str, seed: int) -> Any:
        yield Demonstration(
            task=self.tasks(split)[0],
            messages=[{"role": "user", "content": f"Go on, {split}-0"}],
        )


class ForgetsChance(Faithful):
    def restore(self, state: State) -> None:
        self.state = state


class ForgetsWhatWasSaid(Faithful):
    def snapshot(self) -> Any:
        return self.rng.getstate()

    def restore(self, state: Any) -> None:
        self.rng.setstate(state)


class Disturbed(Faithful):
    def snapshot(self) -> Any:
        self.rng.random()
        return super().snapshot()


class Unpicklable(Faithful):
    def snapshot(self) -> Any:
        return threading.Lock()


class Late(Faithful):
    def snapshot(self) -> Any:
        time.sleep(600)


class Broken(Faithful):
    def restore(self, state: State) -> None:
        raise KeyError("no such state")


class OnlySnapshot(Faithful):
    restore = Env.restore


class Without(Faithful):
    snapshot = Env.snapshot
    restore = Env.restore


class WithCoroutines:
    """The same as an AsyncEnv."""

    tools: Sequence[str] = ()
    rubric = None

    def __init__(self) -> None:
        self.env = Faithful()

    def tasks(self, split: str) -> Sequence[Task]:
        return self.env.tasks(split)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.env.reset(seed=seed, options=options)

    async def step(self, action: Action) -> Any:
        return self.env.step(action)

    async def anchor(self) -> str:
        return self.env.anchor()

    async def snapshot(self) -> Any:
        return self.env.snapshot()

    async def restore(self, state: State) -> None:
        self.env.restore(state)

    async def close(self) -> None:
        return None
