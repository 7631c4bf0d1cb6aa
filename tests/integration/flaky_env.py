"""An environment of which each kind of task misbehaves in its own way; the others are friendly."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from agentrl import Action, Demonstration, Env, Score, ScriptedTurn, Task
from agentrl.env.base import Episode, Observation

KINDS = ("good", "raises", "hangs", "wrong_type", "nan_reward", "late_reward", "bad_score")
WORDS = ("yes", "no")


class _Rubric:
    def score(self, episode: Episode) -> Any:
        kind = episode.task.data["kind"]
        if kind == "late_reward":
            time.sleep(30)
        if kind == "bad_score":
            return "1.0"
        said = episode.info.get("said")
        return Score(reward=float(said == "yes"), success=said == "yes")


class Flaky(Env):
    """Say yes or no; some tasks break the contract on purpose."""

    rubric = _Rubric()

    def __init__(self, kinds: str = ",".join(KINDS)) -> None:
        self._kinds = kinds.split(",")

    def tasks(self, split: str) -> Sequence[Task]:
        kinds = self._kinds if split == "train" else ["good"]
        return [
            Task(id=f"{split}-{kind}-{i}", data={"kind": kind, "name": f"{split} {i}"})
            for i in range(4)
            for kind in kinds
        ]

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        task = Task(id="demo", data={"kind": "good"})
        for index in count(seed):
            word = WORDS[index % 2]
            yield Demonstration(
                task=task, policy=lambda messages, word=word: ScriptedTurn(content=word)
            )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self._kind = self.pick_task(seed, options).data["kind"]
        return "yes or no?", {}

    def step(self, action: Action) -> Any:
        if self._kind == "raises":
            raise ValueError("the world fell over")
        if self._kind == "hangs":
            time.sleep(30)
        if self._kind == "wrong_type":
            return "just text"
        reward = float("nan") if self._kind == "nan_reward" else 0.0
        return "", reward, True, False, {"said": action.content.strip()}
