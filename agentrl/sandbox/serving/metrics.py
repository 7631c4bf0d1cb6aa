"""What a sandbox server counted, in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_PREFIX = "agentrl_sandbox_"
_SIMPLE = {
    "open": ("gauge", "Sandboxes open now."),
    "created": ("counter", "Sandboxes created."),
    "closed": ("counter", "Sandboxes closed by their client or at shutdown."),
    "reaped": ("counter", "Sandboxes closed because their client was not heard of."),
    "leaked": ("counter", "Sandboxes whose closing failed or took too long."),
    "create_failures": ("counter", "Sandboxes that could not be created in time."),
    "restarts": ("counter", "How often this worker died and was replaced."),
}


@dataclass(slots=True)
class CallCounts:
    """Calls of one worker by operation and outcome, and the seconds that they took."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)

    def add(self, operation: str, outcome: str, duration_s: float) -> None:
        """Count one call."""
        self.outcomes[operation, outcome] += 1
        self.seconds[operation] += duration_s  # type: ignore[assignment]

    def snapshot(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {
            "outcomes": [[*key, count] for key, count in sorted(self.outcomes.items())],
            "seconds": dict(self.seconds),
        }


def render(snapshots: Mapping[int, Mapping[str, Any] | None]) -> str:
    """Return the page of all workers; a snapshot is None where a worker did not answer."""
    return "\n".join(_lines(dict(sorted(snapshots.items())))) + "\n"


def _lines(snapshots: Mapping[int, Mapping[str, Any] | None]) -> Iterator[str]:
    yield from _head("worker_up", "gauge", "Whether the worker answers.")
    for worker, counts in snapshots.items():
        yield f'{_PREFIX}worker_up{{worker="{worker}"}} {int(counts is not None)}'
    living = {worker: counts for worker, counts in snapshots.items() if counts is not None}
    for name, (kind, text) in _SIMPLE.items():
        family = f"{name}_total" if kind == "counter" else name
        yield from _head(family, kind, text)
        for worker, counts in living.items():
            yield f'{_PREFIX}{family}{{worker="{worker}"}} {counts[name]}'
    yield from _head("calls_total", "counter", "Calls by operation and outcome.")
    for worker, counts in living.items():
        for operation, outcome, count in counts["calls"]["outcomes"]:
            labels = f'worker="{worker}",operation="{operation}",outcome="{outcome}"'
            yield f"{_PREFIX}calls_total{{{labels}}} {count}"
    yield from _head("call_seconds_total", "counter", "Seconds spent in calls.")
    for worker, counts in living.items():
        for operation, seconds in sorted(counts["calls"]["seconds"].items()):
            labels = f'worker="{worker}",operation="{operation}"'
            yield f"{_PREFIX}call_seconds_total{{{labels}}} {seconds:.6f}"


def _head(family: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{family} {text}"
    yield f"# TYPE {_PREFIX}{family} {kind}"
