"""Word questions with small numbers, for a model that has to learn them within minutes.

* ``more``: something is added;
* ``less``: something is taken away;
* ``together``: a second person has more than the first one; both together are asked for, which
  takes two steps;
* ``each``: a few boxes hold the same number each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from agentrl.errors import EnvError
from agentrl.seeding import derive_seed
from agentrl.types import Task

KINDS = ("more", "less", "together", "each")
"""Kind of the task at each index, repeated."""
SPLIT_SIZES = {"train": 4096, "val": 512, "test": 1024}
NAMES = ("Ada", "Bo", "Cy", "Di", "Eve", "Flo")
THINGS = ("apples", "pens", "coins", "shells", "books", "cards")


@dataclass(slots=True, frozen=True, kw_only=True)
class Question:
    """The words and numbers of a question."""

    kind: str
    name: str
    other: str
    thing: str
    a: int
    b: int

    @property
    def text(self) -> str:
        """The question as the model reads it."""
        a, b, name, thing = self.a, self.b, self.name, self.thing
        if self.kind == "more":
            return f"{name} has {a} {thing} and gets {b} more. How many {thing}?"
        if self.kind == "less":
            return f"{name} has {a} {thing} and loses {b}. How many {thing}?"
        if self.kind == "each":
            return f"{name} has {b} boxes with {a} {thing} each. How many {thing}?"
        return f"{name} has {a} {thing} and {self.other} has {b} more. How many {thing} together?"

    @property
    def answer(self) -> int:
        """The right answer."""
        results = {
            "more": self.a + self.b,
            "less": self.a - self.b,
            "together": self.a + self.a + self.b,
            "each": self.a * self.b,
        }
        return results[self.kind]


def tasks(split: str) -> Sequence[Task]:
    """Return the tasks of ``train``, ``val`` or ``test``: no text occurs in two of them.

    Raises:
        EnvError: another split.
    """
    if split not in SPLIT_SIZES:
        raise EnvError(f"qa has the splits {', '.join(SPLIT_SIZES)}, got {split!r}")
    return _tasks(split)


def split_of(text: str) -> str:
    """Return the split that a text belongs to, by hash."""
    bucket = derive_seed("qa question", text) % 100
    return "test" if bucket < 20 else "val" if bucket < 30 else "train"


@lru_cache(maxsize=3)
def _tasks(split: str) -> list[Task]:
    rng = random.Random(f"qa:{split}")
    seen: set[str] = set()
    result: list[Task] = []
    while len(result) < SPLIT_SIZES[split]:
        question = _draw(rng, KINDS[len(result) % len(KINDS)])
        if question.text in seen or split_of(question.text) != split:
            continue
        seen.add(question.text)
        result.append(_task(question, split, len(result)))
    return result


def _task(question: Question, split: str, index: int) -> Task:
    """Lay a task out as rows of files are, so that one reward function fits both."""
    answer = str(question.answer)
    return Task(
        id=f"{split}-{index}",
        data={
            "prompt": question.text,
            "answer": answer,
            "data_source": "agentrl/qa",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {
                "split": split,
                "index": index,
                "kind": question.kind,
                "a": question.a,
                "b": question.b,
            },
        },
        tags={"kind": question.kind},
    )


def _draw(rng: random.Random, kind: str) -> Question:
    name, other = rng.sample(NAMES, 2)
    a, b = rng.randrange(2, 13), rng.randrange(2, 10)
    if kind == "less":
        a += b
    elif kind == "each":
        b = rng.randrange(2, 6)
    return Question(kind=kind, name=name, other=other, thing=rng.choice(THINGS), a=a, b=b)
