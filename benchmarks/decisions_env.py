"""K independent rewarded decisions per episode: what credit per turn is for.

Each turn shows a word and asks for one of two answers; a fixed table says which one is right and
the turn is paid 1 for it. Nothing carries over from turn to turn, so all that a turn's reward says
is about that turn. An estimator that credits whole episodes has to tell it from the noise of the
K - 1 others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from agentrl import Demonstration, Env, Task
from agentrl.env.base import ScriptedTurn
from agentrl.seeding import derive_seed

ANSWERS = "ab"
NUM_WORDS = 8
SPLITS = ("train", "val", "test")


class Decisions(Env):
    """Answer ``num_turns`` words, one a turn.

    Args:
        num_turns: K.
    """

    def __init__(self, num_turns: int = 8) -> None:
        self._num_turns = num_turns
        self._words: Sequence[int] = ()
        self._turn = 0

    def tasks(self, split: str) -> Sequence[Task]:
        """Sequences of words; the splits share none."""
        found: dict[str, Task] = {}
        index, wanted = 0, 4096 if split == "train" else 256
        while len(found) < wanted:
            words = self._draw(f"{split} {index}")
            name = "".join(map(str, words))
            if derive_seed("decisions split", name) % len(SPLITS) == SPLITS.index(split):
                found[name] = Task(id=name, data={"words": words})
            index += 1
        return list(found.values())

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._words = self.pick_task(seed, options).data["words"]
        self._turn = 0
        return f"word {self._words[0]}", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reward = float(action.content.strip() == right_answer(self._words[self._turn]))
        self._turn += 1
        over = self._turn == self._num_turns
        return "" if over else f"word {self._words[self._turn]}", reward, over, False, {}

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        """Answer at random: the warm start knows the answers there are, not which is right."""
        rng = random.Random(f"{seed}:{split}")
        tasks = self.tasks(split)

        def answer(messages: Any) -> ScriptedTurn:
            return ScriptedTurn(content=rng.choice(ANSWERS))

        while True:
            yield Demonstration(task=rng.choice(tasks), policy=answer)

    def _draw(self, name: str) -> list[int]:
        rng = random.Random(derive_seed("decisions", name, self._num_turns))
        return [rng.randrange(NUM_WORDS) for _ in range(self._num_turns)]


def right_answer(word: int) -> str:
    """The fixed table: as many of one answer as of the other, in no simple order."""
    return ANSWERS[int("10010110"[word])]
