from __future__ import annotations

import json
import random

import numpy as np
import pytest

from agentrl.errors import CheckpointError
from agentrl.train.rng_state import capture_rng, restore_rng


def _draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]


def test_both_generators_go_on_where_they_were() -> None:
    random.seed(3)
    np.random.seed(4)
    _draw()  # leaves half of a pair of normal numbers in each generator
    state = json.loads(json.dumps(capture_rng()))
    want = _draw()
    _draw()
    restore_rng(state)
    assert _draw() == want


@pytest.mark.parametrize("state", [{}, {"python": [3, [1], None]}, {"python": 5}, {"python": []}])
def test_what_is_no_state_of_generators_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="random generators cannot be restored"):
        restore_rng(state)
