"""Where a run stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run stands: with the engine's state, all that resuming needs."""

    step: int = 0
    cursor: int = 0
    """Index in the stream of prompts of the next one to be dispatched for the first time."""
    empty_steps: int = 0
    """Steps in a row without a trainable signal."""
    skipped_updates: int = 0
    """Updates in a row with a non-finite gradient."""
    mismatch_warnings: int = 0
    """Steps whose mismatch was above ``failure.warn_mismatch``."""
    learner: dict[str, Any] = field(default_factory=dict)
    """State of the learner, such as an adaptive KL coefficient."""
    feed: dict[str, Any] = field(default_factory=dict)
    """State of the feed of prompts: which tasks, and what the curriculum knows of them."""
