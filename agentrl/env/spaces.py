"""gymnasium spaces of text environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium

from agentrl.types import Action

_ROLES = frozenset({"system", "user", "assistant", "tool"})


class ObservationSpace(gymnasium.Space[Any]):
    """Text, or a sequence of chat messages."""

    def __init__(self) -> None:
        super().__init__(shape=None, dtype=None)

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is text or a sequence of messages."""
        if isinstance(x, str):
            return True
        return isinstance(x, Sequence) and all(
            isinstance(item, dict)
            and item.get("role") in _ROLES
            and isinstance(item.get("content"), str)
            for item in x
        )

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return an arbitrary observation."""
        return f"observation {int(self.np_random.integers(1000))}"

    def __eq__(self, other: object) -> bool:
        """All are alike."""
        return isinstance(other, ObservationSpace)


class ActionSpace(gymnasium.Space[Any]):
    """An :class:`~agentrl.types.Action`."""

    def __init__(self) -> None:
        super().__init__(shape=None, dtype=None)

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is an action."""
        return isinstance(x, Action)

    def sample(self, mask: Any = None, probability: Any = None) -> Action:
        """Return an arbitrary action without tool calls."""
        text = f"action {int(self.np_random.integers(1000))}"
        return Action(text=text, content=text)

    def __eq__(self, other: object) -> bool:
        """All are alike."""
        return isinstance(other, ActionSpace)
