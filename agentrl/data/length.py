"""The bound on the length of prompts, which only the tokenizer can tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.data.config import OverlongPrompts
from agentrl.errors import AgentRLError, DataError
from agentrl.types import Message, Task

CountTokens = Callable[[Sequence[Message]], int]
_NUM_NAMED = 3


@dataclass(slots=True, kw_only=True)
class Bounded:
    """Tasks whose prompts fit."""

    tasks: list[Task]
    dropped: list[str] = field(default_factory=list)
    """Ids of those that did not."""


def bound_prompts(
    tasks: Sequence[Task],
    *,
    max_tokens: int,
    policy: OverlongPrompts,
    count_tokens: CountTokens,
    key: str,
) -> Bounded:
    """Drop or refuse tasks with a prompt of more than ``max_tokens`` tokens.

    Args:
        count_tokens: length of a conversation as the model is shown it.
        key: the setting that named the tasks, for messages: ``data.train``.

    Raises:
        DataError: the policy is to refuse, no task is left, or a prompt cannot be rendered.
    """
    kept: list[Task] = []
    overlong: dict[str, int] = {}
    for task in tasks:
        num_tokens = _num_tokens(task, count_tokens, key)
        if num_tokens <= max_tokens:
            kept.append(task)
        else:
            overlong[task.id] = num_tokens
    if overlong and (policy is OverlongPrompts.refuse or not kept):
        examples = ", ".join(f"{name!r} ({n})" for name, n in list(overlong.items())[:_NUM_NAMED])
        fix = "raise it" if not kept else "raise it, or set data.overlong_prompts=drop"
        raise DataError(
            f"{key}: {len(overlong)} of {len(tasks)} prompts have more tokens than "
            f"data.max_prompt_tokens={max_tokens} (or, where that is not set, than the context "
            f"has room for), for example {examples}; {fix}"
        )
    return Bounded(tasks=kept, dropped=list(overlong))


def prompt_messages(task: Task) -> list[Message]:
    """Return the prompt of a task of a file as chat messages."""
    prompt = task.data["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _num_tokens(task: Task, count_tokens: CountTokens, key: str) -> int:
    try:
        return count_tokens(prompt_messages(task))
    except AgentRLError as error:
        raise DataError(
            f"{key}: the prompt of task {task.id!r} cannot be rendered: {error}"
        ) from error
