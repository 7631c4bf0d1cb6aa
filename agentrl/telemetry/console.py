"""Live progress on the console: a small panel on a terminal, one line per step elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.telemetry.charts import env_label
from agentrl.telemetry.tracker import TrackedRun, is_finite, plain_value

_BARS = "▁▂▃▄▅▆▇█"
_MAX_STOP_REASONS = 4
_SPARKLINE_WIDTH = 40


def say(text: str, *, quiet: bool) -> None:
    """Tell people what goes on, on standard error; with ``quiet`` nothing."""
    if not quiet:
        Console(stderr=True).print(text, soft_wrap=True, highlight=False, markup=False)


class RichTracker:
    """Shows step, success, reward, turns, tokens per second, stop reasons and the time left.

    On a terminal it is a panel that is redrawn in place. Where the output is no terminal, or
    ``CI`` is set, it is one plain line per step without any control code.

    Args:
        run: what is followed.
        quiet: show nothing.
        console: where to write; standard error by default, so that output can be piped.
        clock: seconds on a monotonic clock, for the time left.
    """

    def __init__(
        self,
        run: TrackedRun,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._quiet = quiet
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._started = clock()
        self._first_step: int | None = run.keep_through_step
        self._success: list[float] = []
        self._shown: dict[str, Any] = {}
        self._step = 0
        live = self._console.is_terminal and not os.environ.get("CI") and not quiet
        self._live = Live(console=self._console, refresh_per_second=4) if live else None

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Show a step. Values that a later call lacks stay on the panel."""
        if self._quiet:
            return
        plain = {key: plain_value(value) for key, value in metrics.items()}
        # Without a checkpoint to start from, the first step seen began at the start.
        self._first_step = step - 1 if self._first_step is None else self._first_step
        self._step = step
        stale = [key for key in self._shown if key.startswith("stop_reason/")]
        if any(key.startswith("stop_reason/") for key in plain):
            for key in stale:
                del self._shown[key]
        self._shown |= plain
        success = plain.get("success/mean")
        if is_finite(success):
            self._success.append(float(success))
        if self._live is None:
            self._console.print(self._line(plain), markup=False, highlight=False, soft_wrap=True)
        else:
            if not self._live.is_started:
                self._live.start()
            self._live.update(self._panel())

    def close(self) -> None:
        """Leave the last panel on the screen and give the terminal back."""
        if self._live is not None and self._live.is_started:
            self._live.stop()

    def _line(self, metrics: Mapping[str, Any]) -> str:
        parts = [f"step {self._progress()}"]
        parts += [f"{label} {text}" for label, text in _figures(metrics)]
        parts += [f"{label} {text}" for label, text in _validation(metrics)]
        reasons = _stop_reasons(metrics)
        parts += [f"stop {reasons}"] if reasons else []
        parts += [f"eta {self._eta()}"] if self._steps_left() else []
        return "  ".join(parts)

    def _panel(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column()
        for label, text in (*_figures(self._shown), *_validation(self._shown)):
            grid.add_row(Text(label), Text(text))
        if self._success:
            grid.add_row("success", Text(sparkline(self._success), style="green"))
        reasons = _stop_reasons(self._shown)
        if reasons:
            grid.add_row("stop", Text(reasons))
        rows: list[RenderableType] = [grid]
        if self._run.total_steps:
            total = self._run.total_steps
            rows.append(ProgressBar(total=total, completed=min(self._step, total), width=48))
        subtitle = f"eta {self._eta()}" if self._steps_left() else None
        title = Text(f"{self._run.name}  step {self._progress()}".strip())
        return Panel(
            Group(*rows), title=title, subtitle=subtitle, title_align="left", subtitle_align="right"
        )

    def _progress(self) -> str:
        total = self._run.total_steps
        return f"{self._step}/{total}" if total else str(self._step)

    def _steps_left(self) -> int:
        """Steps still to do; 0 also where nobody knows how many there will be."""
        return max((self._run.total_steps or 0) - self._step, 0)

    def _eta(self) -> str:
        done = self._step - (self._first_step or 0)
        if done <= 0:
            return "–"
        per_step_s = (self._clock() - self._started) / done
        return duration(per_step_s * self._steps_left())


def sparkline(values: Sequence[float], width: int = _SPARKLINE_WIDTH) -> str:
    """Draw values in [0, 1] as blocks; longer series are averaged down to ``width``."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [
            sum(values[start:end]) / (end - start)
            for start, end in zip(edges, edges[1:], strict=False)
        ]
    top = len(_BARS) - 1
    return "".join(_BARS[round(min(max(value, 0.0), 1.0) * top)] for value in values)


def duration(seconds: float) -> str:
    """Format as ``0.4s``, ``42s``, ``3m05s`` or ``2h07m``."""
    whole = round(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _figures(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown = [
        ("success", "success/mean", "{:.3f}"),
        ("reward", "reward/mean", "{:.3f}"),
        ("turns", "turns/mean", "{:.1f}"),
        ("tokens/s", "throughput/rollout_tokens_per_s", "{:,.0f}"),
        ("seconds", "timing_s/step", "{:.1f}"),
    ]
    return [
        (label, form.format(metrics[key]))
        for label, key, form in shown
        if is_finite(metrics.get(key))
    ]


def _validation(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for key, value in metrics.items():
        prefix, _, rest = key.partition("/")
        if prefix in ("val", "test") and rest.endswith("/success") and is_finite(value):
            low, high = metrics.get(f"{key}_low"), metrics.get(f"{key}_high")
            text = f"{value:.3f}"
            if is_finite(low) and is_finite(high):
                text += f" [{low:.3f}, {high:.3f}]"
            found.append((f"{prefix} {env_label(rest.removesuffix('/success'))}", text))
    return found


def _stop_reasons(metrics: Mapping[str, Any]) -> str:
    fractions = {
        key.removeprefix("stop_reason/"): value
        for key, value in metrics.items()
        if key.startswith("stop_reason/") and is_finite(value)
    }
    ranked = sorted(fractions.items(), key=lambda item: -item[1])[:_MAX_STOP_REASONS]
    return " ".join(f"{name} {value:.0%}" for name, value in ranked)
