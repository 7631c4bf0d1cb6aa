"""Written answers for the warm start: right about half the time, wrong in ways that can be told.

The writer takes the wrong calculation now and then, stops before the second step, forgets the
marker or states two answers. Each slip is independent of the numbers, so reinforcement learning can
find out that the other way pays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.env.base import Demonstration
from agentrl.types import Message, Task
from agentrl_envs.qa.answers import reference_answer, same_answer, stated_answer

SYSTEM_PROMPT = "Work it out, then end with #### and the answer."


@dataclass(slots=True, frozen=True, kw_only=True)
class Slips:
    """How often the writer slips; probabilities."""

    no_marker: float = 0.12
    """States the answer without ``####``."""
    two_answers: float = 0.08
    """States a second answer, to be on the safe side."""
    wrong_sign: float = 0.35
    """``more`` and ``less``: adds where something is lost, and the other way round."""
    one_step: float = 0.45
    """``together``: stops at what the second person has."""
    adds: float = 0.35
    """``each``: adds instead of multiplying."""


NO_SLIPS = Slips(no_marker=0.0, two_answers=0.0, wrong_sign=0.0, one_step=0.0, adds=0.0)


def demonstrations(
    tasks: Sequence[Task], split: str, seed: int, system: str, slips: Slips | None = None
) -> Iterator[Demonstration]:
    """Yield episodes without end, tasks in an order drawn with ``seed``.

    ``metadata["success"]`` says whether the answer is right.
    """
    slips = slips or Slips()
    rng = random.Random(f"{seed}:{split}")
    while True:
        task = rng.choice(tasks)
        text = write(task.data["extra_info"], rng, slips)
        said, right = stated_answer(text), reference_answer(task.data["answer"])
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        yield Demonstration(
            task=task,
            messages=[
                *opening,
                {"role": "user", "content": task.data["prompt"]},
                {"role": "assistant", "content": text},
            ],
            metadata={
                "success": said is not None and right is not None and same_answer(said, right)
            },
        )


def write(question: Any, rng: random.Random, slips: Slips) -> str:
    """Return the text of an answer to the question of ``kind``, ``a`` and ``b``."""
    lines, answer = _work(question["kind"], question["a"], question["b"], rng, slips)
    marker = "" if rng.random() < slips.no_marker else "#### "
    lines.append(f"{marker}{answer}")
    if marker and rng.random() < slips.two_answers:
        lines.append(f"#### {answer + 1}")
    return "\n".join(lines)


def _work(kind: str, a: int, b: int, rng: random.Random, slips: Slips) -> tuple[list[str], int]:
    if kind in ("more", "less"):
        adds = (kind == "more") != (rng.random() < slips.wrong_sign)
        answer = a + b if adds else a - b
        return [f"{a}{'+' if adds else '-'}{b}={answer}"], answer
    if kind == "each":
        adds = rng.random() < slips.adds
        answer = a + b if adds else a * b
        return [f"{a}{'+' if adds else '*'}{b}={answer}"], answer
    first = f"{a}+{b}={a + b}"
    if rng.random() < slips.one_step:
        return [first], a + b
    return [first, f"{a}+{a + b}={a + a + b}"], a + a + b
