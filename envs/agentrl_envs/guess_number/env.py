"""Guess a number: a plain text game over several turns, without tools.

The model is told a range and how many guesses it has, says a number, and hears "higher" or "lower".
Halving the range always wins; repeating itself or forgetting an answer mostly loses.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from agentrl.env.base import Demonstration, Env, Episode, Observation
from agentrl.errors import ConfigError, EnvError
from agentrl.seeding import derive_seed
from agentrl.types import Action, Message, Score, Task

MIN_WIDTH, MAX_WIDTH = 5, 10
HABITS = {"halve": 0.4, "count": 0.25, "repeat": 0.35}
"""How demonstrations guess, with probabilities: halve what is left; count up from the low end,
whatever the answers say; say the low end again and again."""
SLIP_PROBABILITY = 0.03
"""Chance per turn that a demonstration guesses any number that is left instead."""
SPLITS = ("train", "val", "test")
_NUMBER = re.compile(r"[0-9]+")


class GuessRubric:
    """1 for a number that was found, 0 otherwise."""

    def score(self, episode: Episode) -> Score:
        """Read the verdict that the last step left in ``info``."""
        solved = bool(episode.info.get("solved", False))
        return Score(reward=float(solved), success=solved)


class GuessNumber(Env):
    """Guess a number of one decade, such as one from 42 to 48.

    Args:
        turn_reward: what all turns together may earn for narrowing the range. Paid as a difference
            of potentials, ``1 - log(candidates left) / log(candidates at first)``, so it cannot be
            farmed; 0 leaves the outcome alone.

    Raises:
        ConfigError: ``turn_reward`` is negative or not finite.
    """

    rubric = GuessRubric()

    def __init__(self, turn_reward: float = 0.0) -> None:
        if not 0 <= turn_reward < math.inf:
            raise ConfigError(f"env.kwargs.turn_reward is {turn_reward}; give 0 or more")
        self._turn_reward = turn_reward
        self._low = self._high = self._secret = 0
        self._first_width = 1
        self._guesses_left = 0

    def tasks(self, split: str) -> Sequence[Task]:
        """Return every (range, number) of the split; the splits share none."""
        if split not in SPLITS:
            raise EnvError(f"guess_number has the splits {', '.join(SPLITS)}, got {split!r}")
        return _tasks()[split]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Think of the task's number."""
        data = self.pick_task(seed, options).data
        self._low, self._high, self._secret = data["low"], data["high"], data["secret"]
        self._first_width = self._high - self._low + 1
        self._guesses_left = num_guesses(self._first_width)
        return prompt(self._low, self._high), {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Compare the guess. A turn that is no single number costs a guess too."""
        self._guesses_left -= 1
        potential = self._potential()
        guess = parse_guess(action.content)
        solved = guess == self._secret
        if guess is None:
            answer = f"Say one number from {self._low} to {self._high}."
        elif solved:
            answer = "correct"
            self._low = self._high = guess
        elif guess < self._secret:
            answer = "higher"
            self._low = max(self._low, guess + 1)
        else:
            answer = "lower"
            self._high = min(self._high, guess - 1)
        reward = self._turn_reward * (self._potential() - potential)
        terminated = solved or self._guesses_left == 0
        return answer, reward, terminated, False, {"solved": solved}

    def anchor(self) -> str:
        """Return what is known of the number: equal knowledge, equal state."""
        return f"{self._low}-{self._high}:{self._guesses_left}"

    def snapshot(self) -> tuple[int, int, int]:
        """Return the range that is left and the guesses left in it."""
        return self._low, self._high, self._guesses_left

    def restore(self, state: tuple[int, int, int]) -> None:
        """Go on from a snapshot; the number itself is the task's."""
        self._low, self._high, self._guesses_left = state

    def demonstrations(self, split: str, seed: int) -> Iterator[Demonstration]:
        """Yield games of :func:`scripted_guess`, which wins about half of them."""
        rng = random.Random(f"{seed}:{split}")
        tasks = self.tasks(split)
        env = GuessNumber()
        while True:
            task = rng.choice(tasks)
            messages, info = _play(env, task, rng)
            yield Demonstration(task=task, messages=messages, metadata={"success": info["solved"]})

    def _potential(self) -> float:
        return 1.0 - math.log(self._high - self._low + 1) / math.log(self._first_width)


def prompt(low: int, high: int) -> str:
    """Return the first message of a game."""
    return f"Guess my number from {low} to {high} in {num_guesses(high - low + 1)} guesses."


def num_guesses(width: int) -> int:
    """Return how many guesses halving needs at worst: ``ceil(log2(width + 1))``."""
    return math.ceil(math.log2(width + 1))


def parse_guess(text: str) -> int | None:
    """Return the one number in ``text``; None where there is none, or more than one."""
    numbers = _NUMBER.findall(text)
    if len(numbers) != 1 or len(numbers[0]) > 6:
        return None
    return int(numbers[0])


def scripted_guess(
    habit: str, first: range, candidates: range, turn: int, rng: random.Random
) -> int:
    """Guess as the demonstrations do, with a slip now and then.

    Args:
        habit: one of :data:`HABITS`, kept for a whole game.
        first: the range at the start.
        candidates: what the answers so far leave of it.
        turn: 0 for the first guess.
        rng: decides on slips.
    """
    if rng.random() < SLIP_PROBABILITY:
        return rng.choice(candidates)
    if habit == "halve":
        return candidates[len(candidates) // 2]
    return first[turn % len(first)] if habit == "count" else first[0]


def _play(env: GuessNumber, task: Task, rng: random.Random) -> tuple[list[Message], dict[str, Any]]:
    observation, info = env.reset(options={"task": task})
    messages: list[Message] = [{"role": "user", "content": str(observation)}]
    first = range(env._low, env._high + 1)
    (habit,) = rng.choices(list(HABITS), list(HABITS.values()))
    done = False
    while not done:
        left = range(env._low, env._high + 1)
        guess = scripted_guess(habit, first, left, len(messages) // 2, rng)
        messages.append({"role": "assistant", "content": str(guess)})
        observation, _, done, _, info = env.step(Action(text=str(guess), content=str(guess)))
        if not done:
            messages.append({"role": "user", "content": str(observation)})
    return messages, info


@lru_cache(maxsize=1)
def _tasks() -> dict[str, list[Task]]:
    """Every window of 5 to 10 numbers within a decade, with every number in it.

    An eighth of the windows occurs in the test split only. Of the others, each number falls into
    one split. Both by hash, so that the splits stay as they are when the game grows.
    """
    splits: dict[str, list[Task]] = {split: [] for split in SPLITS}
    for decade in range(10, 100, 10):
        for low in range(decade, decade + 10):
            for high in range(low + MIN_WIDTH - 1, min(low + MAX_WIDTH, decade + 10)):
                unseen = derive_seed("guess_number window", low, high) % 8 == 0
                for secret in range(low, high + 1):
                    split = "test" if unseen else _split(low, high, secret)
                    splits[split].append(_task(low, high, secret, unseen))
    return splits


def _split(low: int, high: int, secret: int) -> str:
    bucket = derive_seed("guess_number task", low, high, secret) % 100
    return "test" if bucket < 18 else "val" if bucket < 28 else "train"


def _task(low: int, high: int, secret: int, unseen: bool) -> Task:
    return Task(
        id=f"{low}-{high}-{secret}",
        data={"low": low, "high": high, "secret": secret},
        tags={"range": "unseen" if unseen else "seen", "width": str(high - low + 1)},
    )
