"""What a tool server counts, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from agentrl.types import ToolResult

_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ServerMetrics:
    """Counts of one server since it started."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        """By tool and status."""
        self.refused: Counter[str] = Counter()
        """Requests that were refused, by reason."""
        self.sessions_opened = 0
        self.sessions_closed: Counter[str] = Counter()
        """By reason: ``client``, ``idle``, ``shutdown``, ``one_call``."""
        self._seconds: dict[str, list[int]] = {}
        self._seconds_sum: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()
        self._breaker_open: Counter[str] = Counter()

    def add(self, result: ToolResult) -> None:
        """Count a call."""
        tool = result.name
        self.calls[tool, result.status.value] += 1
        self._retries[tool] += result.retries
        self._breaker_open[tool] += result.breaker_open
        buckets = self._seconds.setdefault(tool, [0] * (len(_BUCKETS_S) + 1))
        buckets[bisect_left(_BUCKETS_S, result.duration_s)] += 1
        self._seconds_sum[tool] += result.duration_s  # pyright: ignore[reportArgumentType]

    def text(self, *, num_sessions: int, num_requests: int) -> str:
        """Return everything, with what is open now."""
        return "\n".join([*self._lines(num_sessions, num_requests), ""])

    def _lines(self, num_sessions: int, num_requests: int) -> Iterator[str]:
        prefix = "agentrl_tool_server"
        yield f"# TYPE {prefix}_sessions gauge"
        yield f"{prefix}_sessions {num_sessions}"
        yield f"# TYPE {prefix}_requests gauge"
        yield f"{prefix}_requests {num_requests}"
        yield f"# TYPE {prefix}_sessions_opened_total counter"
        yield f"{prefix}_sessions_opened_total {self.sessions_opened}"
        yield from _counter(f"{prefix}_sessions_closed_total", "reason", self.sessions_closed)
        yield from _counter(f"{prefix}_refused_total", "reason", self.refused)
        yield from _counter(f"{prefix}_retries_total", "tool", self._retries)
        yield from _counter(f"{prefix}_breaker_open_total", "tool", self._breaker_open)
        yield f"# TYPE {prefix}_calls_total counter"
        for (tool, status), count in sorted(self.calls.items()):
            yield f'{prefix}_calls_total{{tool="{tool}",status="{status}"}} {count}'
        yield f"# TYPE {prefix}_call_seconds histogram"
        for tool, buckets in sorted(self._seconds.items()):
            total = 0
            for edge, count in zip((*map(str, _BUCKETS_S), "+Inf"), buckets, strict=True):
                total += count
                yield f'{prefix}_call_seconds_bucket{{tool="{tool}",le="{edge}"}} {total}'
            yield f'{prefix}_call_seconds_sum{{tool="{tool}"}} {self._seconds_sum[tool]:.6f}'
            yield f'{prefix}_call_seconds_count{{tool="{tool}"}} {total}'


def _counter(name: str, label: str, counts: Counter[str]) -> Iterator[str]:
    yield f"# TYPE {name} counter"
    for value, count in sorted(counts.items()):
        yield f'{name}{{{label}="{value}"}} {count}'
