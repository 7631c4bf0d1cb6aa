"""An environment of fixed lengths that takes the time of a tool, picked from a stored table.

On an ordinary event loop it waits for real: benchmarks use it with real engines.
"""

from __future__ import annotations

import asyncio
import random
import string
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.env.base import Observation, Rubric
from agentrl.seeding import derive_seed
from agentrl.testing.tables import lognormal
from agentrl.types import Action, Task

LETTERS = string.ascii_uppercase
"""A token each, for a tokenizer of bytes."""


class ClockEnv:
    """An asynchronous environment: every answer comes after a latency that the seed picks.

    Episodes earn something between 0 and 1 in their last turn, as the seed says.

    Args:
        num_turns: of an episode.
        latency_median_s, latency_p99_s: of a lognormal distribution; both 0 for no latency.
        latency_limit_s: the tool's own deadline, at which it answers in any case.
        prompt_chars: letters of the first prompt, drawn anew for every task.
        answer_chars: letters that the environment says after every turn but the last.
        num_tasks: of the split ``train``, which is the only one.
    """

    tools: Sequence[str] = ()
    rubric: Rubric | None = None

    def __init__(
        self,
        num_turns: int = 2,
        latency_median_s: float = 0.05,
        latency_p99_s: float = 3.0,
        latency_limit_s: float = 10.0,
        prompt_chars: int = 6,
        answer_chars: int = 6,
        num_tasks: int = 64,
    ) -> None:
        self.num_turns = num_turns
        self._latencies = (
            lognormal(median=latency_median_s, p99=latency_p99_s) if latency_median_s else None
        )
        self._limit_s = latency_limit_s
        self._prompt_chars = prompt_chars
        self._answer = _letters(answer_chars, "answer")
        self._num_tasks = num_tasks
        self._seed = 0
        self._turn = 0

    def tasks(self, split: str) -> list[Task]:
        """Return ``num_tasks`` tasks, each with letters of its own."""
        return [
            Task(id=f"{split}-{index}", data={"prompt": _letters(self._prompt_chars, index)})
            for index in range(self._num_tasks if split == "train" else 0)
        ]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin at once."""
        self._seed, self._turn = seed or 0, 0
        return (options or {})["task"].data["prompt"], {}

    async def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Answer after the latency of the turn."""
        await asyncio.sleep(self.latency_s(self._seed, self._turn))
        self._turn += 1
        done = self._turn >= self.num_turns
        return self._answer, done * self.reward(self._seed), done, False, {}

    def latency_s(self, seed: int, turn: int) -> float:
        """Return how long the environment takes in a turn (0-based) of the episode of ``seed``."""
        if self._latencies is None:
            return 0.0
        return min(self._latencies.at(derive_seed(seed, "latency", turn)), self._limit_s)

    def reward(self, seed: int) -> float:
        """Return what the episode of ``seed`` earns."""
        return derive_seed(seed, "reward") / 2**63

    async def tool_state(self, tool: str) -> Mapping[str, Any]:
        """Return nothing: it has no tools."""
        return {}

    async def close(self) -> None:
        """Hold nothing."""


def _letters(number: int, *names: str | int) -> str:
    return "".join(random.Random(derive_seed(0, *names)).choices(LETTERS, k=number))
