"""Word tasks that take two or three calculations.

Every story multiplies two numbers first, which a small model cannot do in its head; what comes next
depends on the kind of story:

* ``parity``: the next number is added if the product is even and taken away if it is odd, so the
  calculator's first answer has to be read;
* ``sum``: two numbers are added before they are multiplied, so the order of operations matters;
* ``difference``: something is taken away after the multiplication.

A number's digits are its tokens, so numbers stay short: no result has more than three digits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from agentrl.errors import EnvError
from agentrl.seeding import derive_seed
from agentrl.types import Task

KINDS = ("parity", "sum", "difference", "parity")
"""Kind of the task at each index, repeated: half the tasks need the first answer to go on."""
SPLIT_SIZES = {"train": 8192, "val": 512, "test": 1024}
NAMES = ("Ann", "Ben", "Cleo", "Dan")
THINGS = ("apples", "pens", "coins", "shells")


@dataclass(slots=True, frozen=True)
class Story:
    """The numbers of a task."""

    kind: str
    name: str
    thing: str
    a: int
    b: int
    c: int

    @property
    def text(self) -> str:
        """The task as the model reads it."""
        if self.kind == "sum":
            return (
                f"{self.name} puts {self.a} red and {self.c} blue {self.thing} "
                f"into each of {self.b} boxes. How many {self.thing}?"
            )
        start = f"{self.name} has {self.b} boxes of {self.a} {self.thing}"
        if self.kind == "difference":
            return f"{start} and loses {self.c}. How many {self.thing}?"
        return (
            f"{start}. If that is even, add {self.c}; if odd, take away {self.c}. "
            f"How many {self.thing}?"
        )

    @property
    def answer(self) -> int:
        """The right answer."""
        if self.kind == "sum":
            return (self.a + self.c) * self.b
        product = self.a * self.b
        if self.kind == "parity" and product % 2 == 0:
            return product + self.c
        return product - self.c


def tasks(split: str) -> Sequence[Task]:
    """Return the tasks of ``train``, ``val`` or ``test``: no text occurs in two of them.

    Raises:
        EnvError: another split.
    """
    if split not in SPLIT_SIZES:
        raise EnvError(f"calculator has the splits {', '.join(SPLIT_SIZES)}, got {split!r}")
    return _tasks(split)


def split_of(text: str) -> str:
    """Return the split that a text belongs to, by hash."""
    bucket = derive_seed("calculator task", text) % 100
    return "test" if bucket < 20 else "val" if bucket < 30 else "train"


@lru_cache(maxsize=3)
def _tasks(split: str) -> list[Task]:
    rng = random.Random(f"calculator:{split}")
    seen: set[str] = set()
    result: list[Task] = []
    while len(result) < SPLIT_SIZES[split]:
        story = _draw(rng, KINDS[len(result) % len(KINDS)])
        if story.text in seen or split_of(story.text) != split:
            continue
        seen.add(story.text)
        result.append(
            Task(
                id=f"{split}-{len(result)}",
                data={
                    "prompt": story.text,
                    "kind": story.kind,
                    "a": story.a,
                    "b": story.b,
                    "c": story.c,
                    "answer": story.answer,
                },
                tags={"kind": story.kind},
            )
        )
    return result


def _draw(rng: random.Random, kind: str) -> Story:
    return Story(
        kind=kind,
        name=rng.choice(NAMES),
        thing=rng.choice(THINGS),
        a=rng.randrange(11, 60),
        b=rng.randrange(3, 10),
        c=rng.randrange(2, 10),
    )
