"""Memory of a GPU, as far as it can be told without one."""

from __future__ import annotations

import pytest

from agentrl.errors import EngineError
from agentrl.weights.channels.cuda_memory import DeviceMemory, all_or_none


class Memory(DeviceMemory):
    """Counts how often it was let go."""

    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        """Note it."""
        self.num_closed += 1


def test_where_one_slot_cannot_be_had_the_others_are_let_go() -> None:
    slots = [Memory(), Memory()]

    def refuse() -> DeviceMemory:
        raise EngineError("out of memory")

    with pytest.raises(EngineError, match="out of memory"):
        all_or_none([lambda: slots[0], lambda: slots[1], refuse])
    assert [slot.num_closed for slot in slots] == [1, 1]
    assert all_or_none([lambda: slots[0], lambda: slots[1]]) == slots
    assert [slot.num_closed for slot in slots] == [1, 1]
