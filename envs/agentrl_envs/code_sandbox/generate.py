"""Procedural tasks: ambiguous descriptions of list programs, told apart only by examples.

A task says for example "Write f(x): rotate by 2 then filter by 4." and shows two examples. Each
phrase may be read in one to three ways, so a description stands for several programs, its
*readings*, of which one is the answer. Every example, visible or hidden, refutes every other
reading: one check tells right from wrong.

Splits are disjoint by description: a hash of its text puts it into train, val or test, whatever
the level and the seed. Besides, some pairs of operations are held out of train and val; they
make the ``unseen`` stratum, a quarter of the test split. Strata repeat with the index, so each
prefix whose length is a multiple of :func:`stratum_period` holds them in exact proportion.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import overload

from agentrl.errors import ConfigError
from agentrl.types import Task

from .operations import OPERATIONS, Operation, apply_program

NUM_VISIBLE = 2
NUM_HIDDEN = 6
SPLIT_SIZES = {"train": 1_000_000, "val": 512, "test": 1_024}

_VAL_PERCENT = 10
_TEST_PERCENT = 20
_HELD_OUT_ONE_IN = 8
_UNSEEN_EVERY = 4
_MAX_INPUT_DRAWS = 60


@dataclass(slots=True, frozen=True)
class Level:
    """One step of difficulty."""

    num_operations: int
    num_readings: tuple[int, ...]
    """Cycled by task index, so that each split has the same mixture."""
    lengths: tuple[int, ...]
    """Of the input lists."""


LEVELS = {
    1: Level(2, (2, 3), (3, 4)),
    2: Level(2, (4, 6), (4, 5)),
    3: Level(3, (8, 12, 8, 18), (5, 6)),
}


class GeneratedTasks(Sequence[Task]):
    """The tasks of one level and split, made when asked for.

    Task ``i`` is a pure function of (level, split, seed, i).
    """

    def __init__(self, level: int, split: str, *, seed: int = 0, size: int | None = None) -> None:
        if level not in LEVELS:
            raise ConfigError(f"level must be one of {sorted(LEVELS)}, got {level!r}")
        if split not in SPLIT_SIZES:
            raise ConfigError(f"split must be one of {sorted(SPLIT_SIZES)}, got {split!r}")
        if size is not None and size < 1:
            raise ConfigError(f"size must be at least 1, got {size}; leave it out for the default")
        self.level, self.split, self.seed = level, split, seed
        self._size = SPLIT_SIZES[split] if size is None else size

    def __len__(self) -> int:
        """Return the number of tasks in the split."""
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        """Make one task, or the list of those of a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} tasks")
        return make_task(self.level, self.split, self.seed, position)


def make_task(level: int, split: str, seed: int, index: int) -> Task:
    """Return task ``index``.

    ``data`` holds ``prompt``, ``description``, ``readings`` (programs, each a list of
    expressions), ``answer`` (the index of the right one), and the examples ``visible`` and
    ``hidden`` as ``[input, output]`` pairs; ``tags`` holds ``level``, ``readings``, ``pairs``.
    """
    spec = LEVELS[level]
    num_readings = spec.num_readings[index % len(spec.num_readings)]
    unseen = (
        split == "test" and index // len(spec.num_readings) % _UNSEEN_EVERY == _UNSEEN_EVERY - 1
    )
    rng = random.Random(f"{seed}/{level}/{split}/{index}")
    while True:
        operations = rng.choice(compositions(level, num_readings, unseen))
        values = [rng.choice(op.values) if op.values else 0 for op in operations]
        description = describe(operations, values)
        if not unseen and split_of(description) != split:
            continue
        readings = _readings(operations, values)
        examples = _separating_examples(readings, spec.lengths, rng)
        if examples is not None:
            break
    answer = rng.randrange(num_readings)
    pairs = [[x, outputs[answer]] for x, outputs in examples]
    visible, hidden = pairs[:NUM_VISIBLE], pairs[NUM_VISIBLE:]
    return Task(
        id=f"level{level}-{split}-{seed}-{index}",
        data={
            "prompt": _prompt(description, visible),
            "description": description,
            "readings": [list(program) for program in readings],
            "answer": answer,
            "visible": visible,
            "hidden": hidden,
        },
        tags={
            "level": str(level),
            "readings": str(num_readings),
            "pairs": "unseen" if unseen else "seen",
        },
    )


def stratum_period(level: int, split: str) -> int:
    """Return the number of tasks after which the strata of a split repeat."""
    return len(LEVELS[level].num_readings) * (_UNSEEN_EVERY if split == "test" else 1)


def split_of(description: str) -> str:
    """Return the split that a description of seen pairs belongs to.

    Without any parameter it belongs to train: elsewhere it would make its pair an unseen one.
    """
    if not any(character.isdigit() for character in description):
        return "train"
    percent = _percentile(f"description:{description}")
    if percent < _TEST_PERCENT:
        return "test"
    return "val" if percent < _TEST_PERCENT + _VAL_PERCENT else "train"


def is_held_out(first: Operation, second: Operation) -> bool:
    """Say whether the two operations, in either order, never meet in train or val.

    One pair in eight is held out, spread evenly: every operation meets most others in training.
    """
    return (OPERATIONS.index(first) + OPERATIONS.index(second)) % _HELD_OUT_ONE_IN == 0


@cache
def compositions(level: int, num_readings: int, unseen: bool) -> list[tuple[Operation, ...]]:
    """Return a level's sequences of distinct operations that have ``num_readings`` readings.

    ``unseen`` asks for those in which two neighbours are a held-out pair, otherwise for those
    without any.
    """
    spec = LEVELS[level]
    return [
        operations
        for operations in itertools.permutations(OPERATIONS, spec.num_operations)
        if math.prod(len(op.readings) for op in operations) == num_readings
        and any(is_held_out(*pair) for pair in itertools.pairwise(operations)) == unseen
    ]


def describe(operations: Sequence[Operation], values: Sequence[int]) -> str:
    """Return the text that stands for all readings."""
    phrases = (op.phrase.format(k=k) for op, k in zip(operations, values, strict=True))
    return " then ".join(phrases)


def _readings(operations: Sequence[Operation], values: Sequence[int]) -> list[tuple[str, ...]]:
    """Return all programs, the last operation's reading changing fastest."""
    choices = [
        [reading.format(k=k) for reading in op.readings]
        for op, k in zip(operations, values, strict=True)
    ]
    return list(itertools.product(*choices))


def _separating_examples(
    readings: Sequence[tuple[str, ...]], lengths: Sequence[int], rng: random.Random
) -> list[tuple[list[int], list[list[int]]]] | None:
    """Draw inputs on which all readings differ, with their outputs; None if they are too rare."""
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for _ in range(_MAX_INPUT_DRAWS):
        x = [rng.randrange(10) for _ in range(rng.choice(lengths))]
        outputs = [apply_program(program, x) for program in readings]
        if len({tuple(y) for y in outputs}) == len(readings):
            found[tuple(x)] = outputs
        if len(found) == NUM_VISIBLE + NUM_HIDDEN:
            return [(list(key), outputs) for key, outputs in found.items()]
    return None


def _prompt(description: str, visible: Sequence[Sequence[list[int]]]) -> str:
    examples = "".join(f"\nf({x}) == {y}" for x, y in visible)
    return f"Write f(x): {description}.{examples}"


def _percentile(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 100
