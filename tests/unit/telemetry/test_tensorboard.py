from __future__ import annotations

import math
from pathlib import Path

from tensorboard.backend.event_processing import event_accumulator as accumulator

from agentrl.telemetry.tensorboard import TensorBoardTracker
from agentrl.telemetry.tracker import TrackedRun


def _read(folder: Path, key: str) -> list[tuple[int, float]]:
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(key)]


def test_numbers_are_written_and_text_is_not(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(TrackedRun(directory=tmp_path))
    tracker.log({"reward/mean": 0.5, "note": "text", "none": None, "nan": math.nan}, 1)
    tracker.close()
    assert _read(tmp_path, "reward/mean") == [(1, 0.5)]


def test_resume_hides_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    first = TensorBoardTracker(TrackedRun(directory=tmp_path))
    for step in (1, 2, 3):
        first.log({"x": float(step)}, step)
    first.close()
    second = TensorBoardTracker(TrackedRun(directory=tmp_path, keep_through_step=1))
    second.log({"x": 20.0}, 2)
    second.close()
    assert _read(tmp_path, "x") == [(1, 1.0), (2, 20.0)]
