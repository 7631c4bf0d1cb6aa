"""Scripted episodes for the warm start: right about half the time, wrong in ways that can be told.

The policy forgets parentheses, goes on without having read whether the product was even, and now
and then states a number without asking the calculator. Each slip is independent of the task, so
reinforcement learning can find out that the other way pays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.env.base import Demonstration
from agentrl.types import Message, Task

SYSTEM_PROMPT = "Use the calculator. End with Answer: NUMBER."


@dataclass(slots=True, frozen=True, kw_only=True)
class Slips:
    """How often the policy slips; probabilities."""

    no_tool: float = 0.12
    """States a number of about the right size without a calculation."""
    unread: float = 0.6
    """``parity``: adds or takes away by the toss of a coin."""
    no_parentheses: float = 0.45
    """``sum``: multiplies before it adds."""
    early: float = 0.4
    """``difference``: forgets to take away."""


NO_SLIPS = Slips(no_tool=0.0, unread=0.0, no_parentheses=0.0, early=0.0)


def demonstrations(
    tasks: Sequence[Task], split: str, seed: int, slips: Slips | None = None
) -> Iterator[Demonstration]:
    """Yield episodes without end, tasks in an order drawn with ``seed``.

    ``metadata["success"]`` says whether the answer is right.
    """
    slips = slips or Slips()
    rng = random.Random(f"{seed}:{split}")
    while True:
        task = rng.choice(tasks)
        expressions, answer = plan(task.data, rng, slips)
        yield Demonstration(
            task=task,
            messages=write_down(task, expressions, answer),
            metadata={"success": answer == task.data["answer"]},
        )


def plan(data: Any, rng: random.Random, slips: Slips) -> tuple[list[tuple[str, int]], int]:
    """Return the calculations ``(expression, result)`` of an episode, and the stated answer."""
    a, b, c = data["a"], data["b"], data["c"]
    if rng.random() < slips.no_tool:
        return [], rng.randrange(30, 600)
    if data["kind"] == "sum":
        if rng.random() < slips.no_parentheses:
            return [(f"{a}+{c}*{b}", a + c * b)], a + c * b
        return [(f"{a}+{c}", a + c), (f"{a + c}*{b}", (a + c) * b)], (a + c) * b
    product = a * b
    first = (f"{a}*{b}", product)
    if data["kind"] == "difference":
        if rng.random() < slips.early:
            return [first], product
        return [first, (f"{product}-{c}", product - c)], product - c
    even = rng.random() < 0.5 if rng.random() < slips.unread else product % 2 == 0
    sign, answer = ("+", product + c) if even else ("-", product - c)
    return [first, (f"{product}{sign}{c}", answer)], answer


def write_down(task: Task, calculations: Sequence[tuple[str, int]], answer: int) -> list[Message]:
    """Return the conversation, with the calculator's answers as the tool gives them."""
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": task.data["prompt"]},
    ]
    for expression, result in calculations:
        function = {"name": "calculator", "arguments": {"expression": expression}}
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": function}],
            }
        )
        messages.append({"role": "tool", "name": "calculator", "content": str(result)})
    messages.append({"role": "assistant", "content": f"Answer: {answer}"})
    return messages
