"""Which charts a run has: metric lines in, named series out. Pure; drawn elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from agentrl.telemetry.environments import environments_in
from agentrl.telemetry.tracker import is_finite

Lines = Sequence[Mapping[str, Any]]

MAX_POINTS = 400
_MAX_LAYERS = 6
OTHER = "other"


@dataclass(slots=True, kw_only=True)
class Series:
    """Points of one line, or of one layer of a stack."""

    label: str
    steps: list[float]
    values: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    sparse: bool = False
    """True for points that stand far apart, which are marked one by one."""


@dataclass(slots=True, kw_only=True)
class Chart:
    """One picture."""

    title: str
    series: list[Series]
    unit: str = ""
    stacked: bool = False
    limits: tuple[float, float] | None = None
    """Fixed range of the vertical axis, for fractions."""


def charts(lines: Lines) -> list[Chart]:
    """Return the charts for which there are data, most important first.

    Args:
        lines: of ``metrics.jsonl``, ascending in ``step``.
    """
    every = [
        _success(lines),
        _single(
            lines,
            "Supervised loss",
            {"train": "sft/loss", "held out": "sft/validation_loss"},
            unit="nats",
        ),
        _single(lines, "Reward", {"train": "reward/mean"}, validation="reward"),
        _single(lines, "Turns per trajectory", {"train": "turns/mean"}, validation="turns"),
        _single(
            lines,
            "Sampled tokens per trajectory",
            {"train": "response_tokens/mean"},
            validation="response_tokens",
        ),
        *_by_environment(lines),
        _family(lines, "Weighted reward by name", "credit/reward/"),
        _advantage_by_turn(lines),
        _single(lines, "Entropy", {"entropy": "actor/entropy"}, unit="nats"),
        _family(lines, "Entropy by turn", "actor/entropy/", unit="nats"),
        _single(lines, "KL", {"kl": "actor/kl"}, unit="nats"),
        _single(
            lines,
            "KL to the reference",
            {"in the loss": "actor/ref_kl", "in the reward": "credit/ref_kl"},
            unit="nats",
        ),
        _single(lines, "Coefficient of the KL", {"coefficient": "actor/kl_coef"}),
        _single(
            lines,
            "Clip and zero-advantage fractions",
            {
                "clipped tokens": "actor/pg_clipfrac",
                "groups of equal rewards": "group/zero_advantage_fraction",
                "groups without advantage": "credit/zero_advantage_fraction",
            },
        ),
        _single(
            lines,
            "Gradient norm",
            {"norm": "actor/grad_norm", "supervised": "sft/grad_norm"},
        ),
        _single(lines, "Explained variance of returns", {"critic": "critic/explained_variance"}),
        _single(
            lines,
            "Throughput",
            {
                "rollout": "throughput/rollout_tokens_per_s",
                "training": "throughput/train_tokens_per_s",
            },
            unit="tokens/s",
        ),
        _stack(lines, "Time per step", step_timings, unit="s"),
        _stack(lines, "Stop reasons", stop_reasons, limits=(0.0, 1.0)),
        *_mismatch(lines),
        _single(
            lines,
            "Rollout correction",
            {
                "mean weight": "correction/is_mean",
                "effective samples": "correction/is_eff_sample_size",
                "rejected": "correction/rs_masked_fraction",
            },
        ),
    ]
    return [chart for chart in every if chart.series]


def step_timings(line: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by top-level span, and what of the step no span covers as ``other``."""
    prefix = "timing_s/"
    spans = {
        key.removeprefix(prefix): float(value)
        for key, value in line.items()
        if key.startswith(prefix) and key.count("/") == 1 and is_finite(value)
    }
    total = spans.pop("step", None)
    if total is not None:
        spans[OTHER] = max(total - sum(spans.values()), 0.0)
    return spans


def stop_reasons(line: Mapping[str, Any]) -> dict[str, float]:
    """Fraction by stop reason."""
    return _parts(line, "stop_reason/")


def env_label(env_id: str) -> str:
    """Short name of an environment: the class, where the id is an import path.

    ``./glossary.py:Glossary`` becomes ``Glossary``; the id of a registered environment stays.
    """
    return env_id.rpartition(":")[2] or env_id


def held_out_keys(lines: Lines, quantity: str) -> list[tuple[str, str]]:
    """Find ``<split>/<env>/<quantity>``: (label, key) with the test split first."""
    keys = sorted(
        {
            key
            for line in lines
            for key in line
            if key.startswith(("val/", "test/")) and key.endswith(f"/{quantity}")
        }
    )
    environments = {key.split("/", 1)[1].rsplit("/", 1)[0] for key in keys}
    labelled = []
    for key in keys:
        split, rest = key.split("/", 1)
        env_id = rest.rsplit("/", 1)[0]
        name = "validation" if split == "val" else split
        labelled.append((name if len(environments) == 1 else f"{name} {env_label(env_id)}", key))
    return labelled


def _success(lines: Lines) -> Chart:
    chart = _single(lines, "Success", {"train": "success/mean"}, validation="success")
    chart.limits = (0.0, 1.0)
    return chart


def _by_environment(lines: Lines) -> list[Chart]:
    """Training curves of each environment, where there are several."""
    names = environments_in(lines)
    if len(names) < 2:
        return []
    wanted = {
        "Success by environment": "success/{}/mean",
        "Reward by environment": "reward/{}/mean",
        "Flat groups by environment": "group/{}/zero_advantage_fraction",
    }
    shown = names[:_MAX_LAYERS]
    return [
        _single(lines, title, {env_label(env): key.format(env) for env in shown})
        for title, key in wanted.items()
    ]


def _advantage_by_turn(lines: Lines) -> Chart:
    """Where in an episode the signal lies; nothing where every episode has one turn."""
    prefix = "credit/advantage_mass/"
    title = "Share of the advantage by turn"
    if len({name for line in lines for name in _parts(line, prefix)}) < 2:
        return Chart(title=title, series=[])
    return _stack(lines, title, partial(_parts, prefix=prefix), limits=(0.0, 1.0))


def _mismatch(lines: Lines) -> list[Chart]:
    """How far engine and trainer are apart: overall, and where."""
    return [
        _single(
            lines,
            "Engine–trainer log-prob gap",
            {"mean absolute": "mismatch/logprob_abs_mean", "largest": "mismatch/logprob_abs_max"},
            unit="nats",
        ),
        _family(lines, "Engine–trainer gap by turn", "mismatch/by_turn/", unit="nats"),
        _family(lines, "Engine–trainer gap by position", "mismatch/by_position/", unit="nats"),
        _single(
            lines,
            "Engine–trainer KL by version",
            {"present version": "mismatch/current/k3_kl", "older versions": "mismatch/stale/k3_kl"},
            unit="nats",
        ),
    ]


def _family(lines: Lines, title: str, prefix: str, *, unit: str = "") -> Chart:
    """A line for each key with the prefix that is not 0 throughout.

    Nothing where there is one only: it is then what another chart shows.
    """
    names = {name for line in lines for name, value in _parts(line, prefix).items() if value}
    if len(names) < 2:
        return Chart(title=title, series=[])
    keys = {name: f"{prefix}{name}" for name in sorted(names)[:_MAX_LAYERS]}
    return _single(lines, title, keys, unit=unit)


def _parts(line: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Finite values of the keys with the prefix, by the rest of the key."""
    return {
        key.removeprefix(prefix): float(value)
        for key, value in line.items()
        if key.startswith(prefix) and is_finite(value)
    }


def _single(
    lines: Lines,
    title: str,
    keys: Mapping[str, str],
    *,
    unit: str = "",
    validation: str | None = None,
) -> Chart:
    series = [_series(lines, label, key) for label, key in keys.items()]
    if validation is not None:
        for label, key in held_out_keys(lines, validation)[: _MAX_LAYERS - 1]:
            series.append(_series(lines, label, key, sparse=True))
    return Chart(title=title, unit=unit, series=[item for item in series if item.steps])


def _series(lines: Lines, label: str, key: str, *, sparse: bool = False) -> Series:
    found = [line for line in lines if is_finite(line.get(key)) and is_finite(line.get("step"))]
    series = Series(
        label=label,
        steps=[float(line["step"]) for line in found],
        values=[float(line[key]) for line in found],
        sparse=sparse,
    )
    low, high = f"{key}_low", f"{key}_high"
    if found and all(is_finite(line.get(low)) and is_finite(line.get(high)) for line in found):
        series.low = [float(line[low]) for line in found]
        series.high = [float(line[high]) for line in found]
    return _thin(series)


def _stack(
    lines: Lines,
    title: str,
    parts_of: Callable[[Mapping[str, Any]], dict[str, float]],
    *,
    unit: str = "",
    limits: tuple[float, float] | None = None,
) -> Chart:
    table = [(float(line["step"]), parts) for line in lines if (parts := parts_of(line))]
    totals: dict[str, float] = {}
    for _, parts in table:
        for name, value in parts.items():
            totals[name] = totals.get(name, 0.0) + value
    ranked = sorted((name for name in totals if name != OTHER), key=lambda name: -totals[name])
    shown, rest = ranked[: _MAX_LAYERS - 1], {*ranked[_MAX_LAYERS - 1 :], OTHER}
    steps = [step for step, _ in table]
    series = [
        Series(label=name, steps=steps, values=[parts.get(name, 0.0) for _, parts in table])
        for name in shown
    ]
    others = [sum(parts.get(name, 0.0) for name in rest) for _, parts in table]
    if any(others):
        series.append(Series(label=OTHER, steps=steps, values=others))
    return Chart(
        title=title,
        unit=unit,
        stacked=True,
        limits=limits,
        series=[_thin(item) for item in series],
    )


def _thin(series: Series) -> Series:
    """Average neighbours so that at most ``MAX_POINTS`` points remain."""
    if len(series.steps) <= MAX_POINTS:
        return series

    def thin(values: list[float]) -> list[float]:
        edges = [round(i * len(values) / MAX_POINTS) for i in range(MAX_POINTS + 1)]
        return [
            sum(values[start:end]) / (end - start)
            for start, end in zip(edges, edges[1:], strict=False)
        ]

    columns = [series.steps, series.values, series.low, series.high]
    thinned = [None if column is None else thin(column) for column in columns]
    return Series(
        label=series.label,
        steps=cast("list[float]", thinned[0]),
        values=cast("list[float]", thinned[1]),
        low=thinned[2],
        high=thinned[3],
        sparse=series.sparse,
    )
