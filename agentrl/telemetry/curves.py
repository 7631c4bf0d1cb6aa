"""``curves.png``: the charts of a run as one picture; needs the extra ``report``."""

from __future__ import annotations

import io
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import DataError
from agentrl.extras import missing_extra
from agentrl.telemetry.charts import Chart, Series, charts
from agentrl.telemetry.files import atomic_write
from agentrl.telemetry.jsonl import read_metrics
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.tracker import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ["#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#64748b"]
"""Blue, amber, green, red, violet, slate: apart also for most kinds of colour blindness."""

_NUM_COLUMNS = 3
_INK, _GRID = "#334155", "#e2e8f0"


def render_curves(run_dir: str | Path | RunDir) -> Path:
    """Draw ``curves.png`` of a run, which may still be going on.

    Raises:
        MissingExtraError: matplotlib is not installed.
        DataError: there are no metrics yet, or they are damaged.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise MissingExtraError(missing_extra("report", "curves.png")) from error
    run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    drawn = charts(read_metrics(run.metrics_path))
    if not drawn:
        raise DataError(f"{run.metrics_path}: holds no metric that can be drawn yet")
    num_rows = -(-len(drawn) // _NUM_COLUMNS)
    # Figure, not pyplot: no global state, no display, safe in any thread.
    figure = Figure(figsize=(5.0 * _NUM_COLUMNS, 3.1 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, _NUM_COLUMNS, squeeze=False).flat
    for chart, ax in zip(drawn, axes, strict=False):
        _draw(ax, chart)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    for ax in list(axes)[len(drawn) :]:
        ax.set_visible(False)
    figure.suptitle(run.name, x=0.01, ha="left", fontsize=13, color=_INK, weight="bold")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, facecolor="white")
    atomic_write(run.curves_path, buffer.getvalue())
    return run.curves_path


def _draw(ax: Axes, chart: Chart) -> None:
    if chart.stacked:
        _draw_stack(ax, chart.series)
    else:
        for series, color in zip(chart.series, COLORS, strict=False):
            _draw_line(ax, series, color)
    ax.set_title(chart.title, loc="left", fontsize=10.5, color=_INK)
    ax.set_ylabel(chart.unit, fontsize=8.5, color=_INK)
    ax.set_xlabel("step", fontsize=8.5, color=_INK)
    if chart.limits is not None:
        ax.set_ylim(*chart.limits)
    elif chart.stacked:
        ax.set_ylim(bottom=0)
    ax.grid(True, color=_GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(_GRID)
    ax.tick_params(labelsize=8.5, colors=_INK, length=0)
    if len(chart.series) > 1 or chart.series[0].sparse or chart.stacked:
        legend: dict[str, Any] = {"fontsize": 8, "frameon": True, "framealpha": 0.85}
        ax.legend(edgecolor="none", labelcolor=_INK, loc="best", **legend)


def _draw_line(ax: Axes, series: Series, color: str) -> None:
    marker = "o" if series.sparse or len(series.steps) == 1 else None
    ax.plot(
        series.steps,
        series.values,
        color=color,
        linewidth=1.6,
        marker=marker,
        markersize=4,
        label=series.label,
    )
    if series.low is not None and series.high is not None:
        ax.fill_between(series.steps, series.low, series.high, color=color, alpha=0.16, linewidth=0)


def _draw_stack(ax: Axes, layers: list[Series]) -> None:
    columns = zip(*(layer.values for layer in layers), strict=True)
    edges = list(zip(*(list(accumulate(column)) for column in columns), strict=True))
    lower = [0.0] * len(layers[0].steps)
    for layer, upper, color in zip(layers, edges, COLORS, strict=False):
        ax.fill_between(
            layer.steps, lower, list(upper), color=color, alpha=0.8, linewidth=0, label=layer.label
        )
        lower = list(upper)
