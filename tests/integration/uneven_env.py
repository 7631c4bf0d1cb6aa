"""A short epoch of number games, some of which are slow to answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from agentrl_envs.guess_number import GuessNumber

from agentrl.types import Action, Task

NUM_TASKS = 12


class Uneven(GuessNumber):
    """Every third task waits ``slow_s`` seconds in each step."""

    process = False

    def __init__(self, slow_s: float = 0.2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._slow_s = slow_s

    def tasks(self, split: str) -> Sequence[Task]:
        tasks = super().tasks(split)
        if split != "train":
            return tasks
        return [
            Task(id=task.id, data={**task.data, "slow": index % 3 == 0}, tags=task.tags)
            for index, task in enumerate(tasks[:NUM_TASKS])
        ]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._slow = bool(options and options["task"].data.get("slow"))
        return super().reset(seed=seed, options=options)

    def step(self, action: Action) -> Any:
        if self._slow:
            time.sleep(self._slow_s)
        return super().step(action)
