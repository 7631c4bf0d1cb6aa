"""Tables of a run, from its metric lines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.telemetry.charts import OTHER, Lines, held_out_keys, step_timings, stop_reasons
from agentrl.telemetry.environments import EnvironmentRow, environment_rows
from agentrl.telemetry.metrics import UNKNOWN_TOOL
from agentrl.telemetry.tracker import is_finite

NO_SUCH_TOOL = "(no such tool)"
"""Label of the calls that named no tool of the task; a tool cannot have this name."""
_EDGE_STEPS = 5
"""Training is noisy: "first" and "last" are means over this many steps, or a quarter of the run."""


@dataclass(slots=True, kw_only=True)
class Change:
    """A number before and after."""

    label: str
    first: float
    last: float
    first_interval: tuple[float, float] | None = None
    last_interval: tuple[float, float] | None = None


@dataclass(slots=True, kw_only=True)
class TimingRow:
    """Seconds of a span."""

    name: str
    depth: int
    total_s: float
    mean_s: float
    fraction: float
    """Of the time of all steps."""


@dataclass(slots=True, kw_only=True)
class StopRow:
    """How often trajectories ended in one way."""

    reason: str
    whole: float
    first: float
    last: float


@dataclass(slots=True, kw_only=True)
class ToolRow:
    """Calls of one tool over the run."""

    name: str
    counts: dict[str, int] = field(default_factory=dict)
    """``calls``, ``errors``, ``timeouts``, ``infra_errors``."""
    seconds: float | None = None
    """Mean of a call."""


def training_lines(lines: Lines) -> list[Mapping[str, Any]]:
    """Lines of steps that trained, without the evaluation before the first."""
    return [line for line in lines if "timing_s/step" in line or "reward/mean" in line]


def held_out_changes(lines: Lines) -> list[Change]:
    """Held-out success, first to last measurement; the test split first."""
    changes = []
    for label, key in held_out_keys(lines, "success"):
        measured = [line for line in lines if is_finite(line.get(key))]
        if measured:
            changes.append(
                Change(
                    label=label,
                    first=float(measured[0][key]),
                    last=float(measured[-1][key]),
                    first_interval=_interval(measured[0], key),
                    last_interval=_interval(measured[-1], key),
                )
            )
    return changes


def training_change(lines: Lines, key: str, label: str) -> Change | None:
    """Mean of the first and of the last steps; None without data."""
    values = [float(line[key]) for line in lines if is_finite(line.get(key))]
    if not values:
        return None
    width = _edge(len(values))
    first, last = values[:width], values[-width:]
    return Change(label=label, first=sum(first) / width, last=sum(last) / width)


def environment_changes(lines: Lines) -> list[EnvironmentRow]:
    """Each environment's training, first to last; nothing where there is only one."""
    steps = training_lines(lines)
    return environment_rows(steps, edge=_edge(len(steps)))


def total(lines: Lines, key: str) -> float:
    """Sum of a metric over all lines."""
    return sum(float(line[key]) for line in lines if is_finite(line.get(key)))


def mean(lines: Lines, key: str) -> float | None:
    """Mean of a metric over the lines that have it."""
    values = [float(line[key]) for line in lines if is_finite(line.get(key))]
    return sum(values) / len(values) if values else None


def timing_rows(lines: Lines) -> list[TimingRow]:
    """Top-level spans by size, each followed by the spans inside it; what none covers last."""
    steps = [line for line in lines if is_finite(line.get("timing_s/step"))]
    whole = total(steps, "timing_s/step")
    if not whole:
        return []
    totals: dict[str, float] = {}
    for line in steps:
        for key, value in line.items():
            name = key.removeprefix("timing_s/")
            inside = "/" in name and f"timing_s/{name.rsplit('/', 1)[0]}" in line
            if key.startswith("timing_s/") and inside and is_finite(value):
                totals[name] = totals.get(name, 0.0) + float(value)
        for name, value in step_timings(line).items():
            totals[name] = totals.get(name, 0.0) + value

    def order(name: str) -> list[tuple[bool, float, str]]:
        parts = name.split("/")
        paths = ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
        return [(path == OTHER, -totals.get(path, 0.0), path) for path in paths]

    return [
        TimingRow(
            name=name.rsplit("/", 1)[-1],
            depth=name.count("/"),
            total_s=totals[name],
            mean_s=totals[name] / len(steps),
            fraction=totals[name] / whole,
        )
        for name in sorted(totals, key=order)
    ]


def stop_rows(lines: Lines) -> list[StopRow]:
    """Stop reasons by frequency over the run, weighted by trajectories."""
    steps = [line for line in lines if stop_reasons(line)]
    width = _edge(len(steps))

    def share(part: Sequence[Mapping[str, Any]], reason: str) -> float:
        weights = [float(line.get("trajectories/count", 1)) for line in part]
        hits = [stop_reasons(line).get(reason, 0.0) for line in part]
        return sum(w * h for w, h in zip(weights, hits, strict=True)) / (sum(weights) or 1.0)

    rows = [
        StopRow(
            reason=reason,
            whole=share(steps, reason),
            first=share(steps[:width], reason),
            last=share(steps[-width:], reason),
        )
        for reason in {reason for line in steps for reason in stop_reasons(line)}
    ]
    return sorted(rows, key=lambda row: (-row.whole, row.reason))


def tool_rows(lines: Lines) -> list[ToolRow]:
    """Tool calls over the run, by number of calls."""
    rows: dict[str, ToolRow] = {}
    spent: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith("tool/") and is_finite(value):
                name, _, kind = key.removeprefix("tool/").rpartition("/")
                counts = rows.setdefault(name, ToolRow(name=name)).counts
                counts[kind] = counts.get(kind, 0) + int(value)
        for name in rows:
            per_call: Any = line.get(f"timing_s/tool/{name}")
            calls: Any = line.get(f"tool/{name}/calls")
            if is_finite(per_call) and is_finite(calls):
                spent[name] = spent.get(name, 0.0) + float(per_call) * float(calls)
    for name, row in rows.items():
        if name in spent and row.counts.get("calls"):
            row.seconds = spent[name] / row.counts["calls"]
        if name == UNKNOWN_TOOL:
            row.name = NO_SUCH_TOOL
    return sorted(rows.values(), key=lambda row: -row.counts.get("calls", 0))


def _edge(count: int) -> int:
    return max(min(_EDGE_STEPS, count // 4), 1)


def _interval(line: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    low, high = line.get(f"{key}_low"), line.get(f"{key}_high")
    return (float(low), float(high)) if is_finite(low) and is_finite(high) else None
