from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.errors import RegistryError
from agentrl.telemetry.jsonl import read_metrics
from agentrl.telemetry.tracker import (
    TRACKERS,
    MissingExtraError,
    MultiTracker,
    TrackedRun,
    build_trackers,
    plain_value,
)


class Recorder:
    def __init__(self, run: TrackedRun | None = None, *, fail_from: int = 10**9) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []
        self.closed = False
        self._fail_from = fail_from

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if step >= self._fail_from:
            raise OSError(28, "No space left on device")
        self.lines.append((step, dict(metrics)))

    def close(self) -> None:
        self.closed = True


def test_a_failing_tracker_is_counted_warned_of_once_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = Recorder(fail_from=2), Recorder()
    tracker = MultiTracker({"bad": bad, "good": good})
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            tracker.log({"x": step}, step)
        tracker.close()
    assert [step for step, _ in good.lines] == [1, 2, 3, 4]
    assert tracker.errors == {"bad": 3}
    assert good.lines[-1][1] == {"x": 4, "tracker/bad/errors": 2}
    assert sum("'bad'" in record.getMessage() for record in caplog.records) == 1
    assert "No space left" in caplog.text
    assert bad.closed and good.closed


def test_a_tracker_cannot_change_what_the_others_receive() -> None:
    class Vandal(Recorder):
        def log(self, metrics: Mapping[str, Any], step: int) -> None:
            metrics.clear()  # type: ignore[attr-defined]

    good = Recorder()
    given = {"x": 1.0}
    MultiTracker({"vandal": Vandal(), "good": good}).log(given, 1)
    assert good.lines == [(1, {"x": 1.0})]
    assert given == {"x": 1.0}


def test_trackers_are_built_by_id_and_misspellings_are_corrected(tmp_path: Path) -> None:
    tracker = build_trackers({"jsonl": {}, "rich": {"quiet": True}}, TrackedRun(directory=tmp_path))
    tracker.log({"x": 1}, 1)
    tracker.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 1}]
    with pytest.raises(RegistryError, match="'jsonl'"):
        build_trackers(["json"], TrackedRun(directory=tmp_path))


def test_a_missing_extra_is_one_line_and_may_be_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard.writer", None)
    run = TrackedRun(directory=tmp_path)
    with pytest.raises(MissingExtraError, match=r"'\.\[tensorboard\]'") as caught:
        build_trackers(["tensorboard"], run)
    assert "\n" not in str(caught.value)
    tracker = build_trackers(["tensorboard", "jsonl"], run, skip_missing=True)
    tracker.log({"x": 1}, 1)
    tracker.close()
    assert "pip install -e '.[tensorboard]'" in caplog.text
    assert read_metrics(tmp_path / "metrics.jsonl")


def test_users_register_their_own(tmp_path: Path) -> None:
    TRACKERS.register("recorder_of_test")(Recorder)
    tracker = build_trackers(["recorder_of_test"], TrackedRun(directory=tmp_path))
    tracker.log({}, 1)
    assert not tracker.errors


def test_plain_values() -> None:
    assert plain_value(torch.tensor(2.5)) == 2.5
    assert plain_value(np.int64(3)) == 3 and type(plain_value(np.int64(3))) is int
    assert plain_value(np.arange(2)) == "array([0, 1])"
    assert plain_value("x") == "x" and plain_value(None) is None and plain_value(True) is True
