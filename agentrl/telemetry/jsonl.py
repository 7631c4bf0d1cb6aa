"""``metrics.jsonl``: one JSON object per logged step, flat keys, safe to append to on resume.

Strict JSON has no word for non-finite numbers: they are written as the strings ``"nan"``,
``"inf"`` and ``"-inf"``, and :func:`read_metrics` turns these back into floats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.errors import DataError
from agentrl.telemetry.files import atomic_write
from agentrl.telemetry.tracker import MetricValue, TrackedRun, plain_value

METRICS_FILE = "metrics.jsonl"

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class JsonlTracker:
    """Appends to ``metrics.jsonl`` of the run's directory.

    On opening, a last line that a kill left half-written is removed, and so are the lines after
    ``run.keep_through_step``; both by one atomic replacement of the file.

    Raises:
        DataError: a line in the middle of an existing file is damaged.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.path = run.directory / METRICS_FILE
        run.directory.mkdir(parents=True, exist_ok=True)
        _restore(self.path, run.keep_through_step)
        self._file = self.path.open("ab")

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Append one line and sync it to the disk."""
        line = {"step": step}
        line |= {key: _encode(value) for key, value in metrics.items() if key != "step"}
        # One write, so that no other writer's bytes can land inside the line.
        self._file.write(_dumps(line))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, MetricValue]]:
    """Read the lines of a metrics file in order of step; lines of one step are merged.

    A half-written last line is ignored: the run may be alive, or was killed.

    Raises:
        DataError: the file is missing, or a line before the last is damaged.
    """
    if not path.is_file():
        raise DataError(f"no metrics at {str(path)!r}: give a run directory's {METRICS_FILE}")
    merged: dict[int, dict[str, MetricValue]] = {}
    for _, line in _parse(path):
        values = {key: _decode(value) for key, value in line.items()}
        merged.setdefault(line["step"], {}).update(values)
    return [merged[step] for step in sorted(merged)]


def missing_steps(path: Path, *, through: int) -> list[int]:
    """Return the steps from 0 to ``through`` of which a metrics file has no line; all without one.

    Raises:
        DataError: a line before the last is damaged.
    """
    known = {line["step"] for _, line in _parse(path)} if path.is_file() else set()
    return [step for step in range(through + 1) if step not in known]


def _restore(path: Path, keep_through_step: int | None) -> None:
    if not path.exists():
        return
    kept = [
        raw + b"\n"
        for raw, line in _parse(path)
        if keep_through_step is None or line["step"] <= keep_through_step
    ]
    content = b"".join(kept)
    if content != path.read_bytes():
        atomic_write(path, content)


def _parse(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return (raw, parsed) of every line; only the last may be damaged, and is then left out."""
    raw_lines = [raw for raw in path.read_bytes().split(b"\n") if raw.strip()]
    lines: list[tuple[bytes, dict[str, Any]]] = []
    for number, raw in enumerate(raw_lines, start=1):
        line = _parse_line(raw)
        if line is not None:
            lines.append((raw, line))
        elif number < len(raw_lines):
            raise DataError(
                f"{path}: line {number} is no JSON object with an integer 'step': "
                f"{raw[:80]!r}; mend or delete that line"
            )
    return lines


def _parse_line(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    ok = isinstance(line, dict) and isinstance(line.get("step"), int)
    return line if ok else None


def _dumps(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, allow_nan=False).encode() + b"\n"


def _encode(value: Any) -> MetricValue:
    plain = plain_value(value)
    if isinstance(plain, float) and not math.isfinite(plain):
        return "nan" if math.isnan(plain) else "inf" if plain > 0 else "-inf"
    return plain


def _decode(value: Any) -> MetricValue:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
