from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.data.config import OverlongPrompts
from agentrl.data.length import Bounded, bound_prompts
from agentrl.errors import DataError, RenderError
from agentrl.types import Message, Task

TASKS = [Task(id=f"t{n}", data={"prompt": " ".join("x" * n)}) for n in range(1, 6)]


def words(messages: Sequence[Message]) -> int:
    return sum(len(message["content"].split()) for message in messages)


def bound(max_tokens: int, policy: str = "drop", tasks: Any = TASKS) -> Bounded:
    return bound_prompts(
        tasks,
        max_tokens=max_tokens,
        policy=OverlongPrompts(policy),
        count_tokens=words,
        key="data.train",
    )


def test_longer_prompts_are_dropped_and_counted() -> None:
    found = bound(3)
    assert [task.id for task in found.tasks] == ["t1", "t2", "t3"]
    assert found.dropped == ["t4", "t5"]
    assert bound(5).tasks == TASKS and bound(5).dropped == []


def test_or_refused_by_name() -> None:
    with pytest.raises(
        DataError,
        match=r"data.train: 2 of 5 prompts have more tokens than data.max_prompt_tokens=3 "
        r".*for example 't4' \(4\), 't5' \(5\); raise it, or set data.overlong_prompts=drop",
    ):
        bound(3, "refuse")
    assert bound(5, "refuse").tasks == TASKS


def test_nothing_left_is_refused_whatever_the_policy() -> None:
    with pytest.raises(DataError, match=r"5 of 5 prompts.*; raise it$"):
        bound(0)


def test_messages_are_counted_as_they_are() -> None:
    chat = [{"role": "system", "content": "a b"}, {"role": "user", "content": "c d"}]
    assert bound(3, tasks=[*TASKS, Task(id="chat", data={"prompt": chat})]).dropped == [
        "t4",
        "t5",
        "chat",
    ]


def test_a_prompt_that_the_template_refuses_is_named() -> None:
    def refuse(messages: Sequence[Message]) -> int:
        raise RenderError("roles must alternate")

    with pytest.raises(DataError, match="task 't1' cannot be rendered: roles must alternate"):
        bound_prompts(
            TASKS, max_tokens=3, policy=OverlongPrompts.drop, count_tokens=refuse, key="data.train"
        )
