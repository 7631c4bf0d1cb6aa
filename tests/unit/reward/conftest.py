"""Episodes to grade."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from agentrl.env.base import Episode
from agentrl.testing import FakeSandboxes
from agentrl.types import Message, StopReason, Task, Turn

MakeEpisode = Callable[..., Episode]


@pytest.fixture
def make_episode() -> MakeEpisode:
    """``make_episode("said in turn 0", "in turn 1", data=..., tokens_per_turn=10)``."""

    def make(
        *said: str,
        data: Mapping[str, Any] | None = None,
        tokens_per_turn: int = 10,
        before: Sequence[Message] = (),
        info: Mapping[str, Any] | None = None,
    ) -> Episode:
        messages: list[Message] = [*before, {"role": "user", "content": "the question"}]
        turns = []
        for index, text in enumerate(said):
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": f"reply {index}"})
            start = 100 * index
            turns.append(
                Turn(
                    index=index, segment=0, start=start, end=start + tokens_per_turn,
                    stop_reason=StopReason.STOP,
                )
            )  # fmt: skip
        return Episode(
            task=Task(id="t1", data=data or {}),
            messages=messages,
            turns=turns,
            info=info or {},
            sandboxes=FakeSandboxes(),
        )

    return make
