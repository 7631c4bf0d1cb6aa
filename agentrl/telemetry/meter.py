"""Where the time goes: one ``with`` per operation gives a metric and a trace event.

::

    with meter.step(step) as metrics:
        with meter.span("collect"):
            ...
    metrics["timing_s/collect"], metrics["timing_s/step"]
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from agentrl.telemetry.files import atomic_write

MAX_TRACE_EVENTS = 200_000
"""Later events are dropped and counted, so that a long run cannot fill the memory."""

_path: ContextVar[str] = ContextVar("agentrl_meter_path", default="")


class Meter:
    """Sums the seconds of named spans per step.

    A span inside a span is reported under the path of both (``timing_s/update/logprob``), so the
    keys with one name add up to at most ``timing_s/step`` where spans do not run concurrently.
    A span belongs to the step during which it ends; outside of any step it is only traced.
    Spans of concurrent tasks and threads are added up.

    Args:
        trace: keep an event per span for :meth:`write_trace`.
        clock: seconds on a monotonic clock.
    """

    def __init__(
        self, *, trace: bool = False, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._trace = trace
        self._clock = clock
        self._origin = clock()
        self._totals: dict[str, float] | None = None
        self._events: list[dict[str, Any]] = []
        self._lanes: dict[str, int] = {}
        self._dropped = 0
        self._lock = threading.Lock()

    @contextmanager
    def step(self, step: int) -> Iterator[dict[str, Any]]:
        """Measure one training step; yields the dict that receives ``timing_s/*`` at the end.

        The timings are written also when the body raises.

        Raises:
            RuntimeError: a step is already open.
        """
        with self._lock:
            if self._totals is not None:
                raise RuntimeError("Meter.step: the previous step is still open")
            totals = self._totals = {}
        metrics: dict[str, Any] = {}
        start = self._clock()
        try:
            yield metrics
        finally:
            end = self._clock()
            with self._lock:
                self._totals = None
            self._record(f"step {step}", start, end)
            metrics |= {f"timing_s/{path}": seconds for path, seconds in totals.items()}
            metrics["timing_s/step"] = end - start

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Measure one operation; nests, and may be used in any task or thread."""
        outer = _path.get()
        path = f"{outer}/{name}" if outer else name
        token = _path.set(path)
        start = self._clock()
        try:
            yield
        finally:
            end = self._clock()
            _path.reset(token)
            with self._lock:
                if self._totals is not None:
                    self._totals[path] = self._totals.get(path, 0.0) + end - start
            self._record(name, start, end)

    def write_trace(self, path: Path) -> None:
        """Write the events of this process as a Chrome trace (``chrome://tracing``, Perfetto)."""
        with self._lock:
            lanes = [
                {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": lane}
                | {"args": {"name": name}}
                for name, lane in self._lanes.items()
            ]
            trace = {
                "displayTimeUnit": "ms",
                "otherData": {"dropped_events": self._dropped},
                "traceEvents": lanes + self._events,
            }
        atomic_write(path, json.dumps(trace))

    def _record(self, name: str, start: float, end: float) -> None:
        if not self._trace:
            return
        lane_name = _lane()
        with self._lock:
            if len(self._events) >= MAX_TRACE_EVENTS:
                self._dropped += 1
                return
            lane = self._lanes.setdefault(lane_name, len(self._lanes))
            self._events.append(
                {
                    "ph": "X",
                    "name": name,
                    "pid": os.getpid(),
                    "tid": lane,
                    "ts": (start - self._origin) * 1e6,
                    "dur": (end - start) * 1e6,
                }
            )


def _lane() -> str:
    """Name the task or thread: events of one lane must nest, those of two tasks overlap."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task.get_name() if task is not None else threading.current_thread().name
