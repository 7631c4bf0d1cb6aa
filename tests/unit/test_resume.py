"""Where a checkpoint says that a run stands is believed only where it can be right."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from agentrl.errors import CheckpointError
from agentrl.resume import read_progress
from agentrl.train.progress import Progress

SAVED = asdict(Progress(step=3, cursor=12, learner={"kl": {"value": 0.1, "coef": 0.1}}))


def test_what_was_saved_comes_back() -> None:
    assert asdict(read_progress(SAVED, step=3)) == SAVED


@pytest.mark.parametrize("key", sorted(SAVED))
def test_a_missing_key_is_named(key: str) -> None:
    state = {name: value for name, value in SAVED.items() if name != key}
    with pytest.raises(CheckpointError, match=f"progress lacks {key}"):
        read_progress(state, step=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"curser": 1}, "progress has the unknown curser"),
        ({"cursor": -1}, r"progress.cursor=-1, which cannot be right"),
        ({"cursor": 1.5}, r"progress.cursor=1.5"),
        ({"cursor": True}, r"progress.cursor=True"),
        ({"empty_steps": "2"}, r"progress.empty_steps='2'"),
        ({"step": 4}, r"of step 3 holds progress.step=4"),
        ({"feed": None}, r"progress.feed=None"),
        ({"learner": {"lk": 1}}, r"progress.learner lacks kl, has the unknown lk"),
    ],
)
def test_what_cannot_be_right_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_progress(SAVED | change, step=3)
