"""``report.html``: what happened in a run, as one file without any external resource.

Works on a run that is going on, crashed or lost some of its files: what cannot be read is named
on the page, and the rest is shown.
"""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from agentrl.errors import DataError
from agentrl.telemetry import summary, svg
from agentrl.telemetry.censoring import Fate, censoring_rows
from agentrl.telemetry.charts import Lines, charts, env_label
from agentrl.telemetry.console import duration
from agentrl.telemetry.divergence import DEFAULT_THRESHOLD, quiet_decoder, run_divergences
from agentrl.telemetry.evaluation import Interval, StratumResult, evaluate_strata, paired_gain
from agentrl.telemetry.files import atomic_write
from agentrl.telemetry.jsonl import read_metrics
from agentrl.telemetry.report_trajectories import (
    ShownTrajectory,
    first_step_trajectory,
    last_step_trajectories,
    newest_failure,
    open_decoder,
)
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.token_view import visible
from agentrl.telemetry.trajectory_io import read_trajectories
from agentrl.types import Trajectory

T = TypeVar("T")

_MAX_DIVERGENCES = 5


@dataclass(slots=True, kw_only=True)
class EvaluationRow:
    """One stratum, at the first and at the last stored evaluation."""

    stratum: str
    last: StratumResult
    first: StratumResult | None


@dataclass(slots=True, kw_only=True)
class EvaluationTable:
    """Evaluations of one split, as they are stored with their trajectories."""

    split: str
    env: str
    """Short name; empty where the run has one environment."""
    first_step: int
    last_step: int
    rows: list[EvaluationRow]
    gain: Interval | None
    """Change in success from first to last, paired by task."""
    gain_tasks: int = 0


@dataclass(slots=True)
class Notices:
    """What could not be read, for the reader of the page."""

    messages: list[str] = field(default_factory=list)

    def guard(self, read: Callable[[], T], default: T) -> T:
        """Return ``read()``, or note why that is not possible and return ``default``."""
        try:
            return read()
        except (DataError, OSError) as error:
            self.messages.append(str(error))
            return default


def render_report(run_dir: str | Path | RunDir, *, seed: int = 0) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    Args:
        run_dir: finished, going on or crashed.
        seed: chooses the random ones among the trajectories shown.

    Raises:
        DataError: there is no such directory.
        OSError: the page cannot be written.
    """
    run = run_dir if isinstance(run_dir, RunDir) else RunDir(run_dir)
    if not run.path.is_dir():
        raise DataError(f"no run directory {str(run.path)!r}")
    notices = Notices()
    lines = notices.guard(lambda: read_metrics(run.metrics_path), [])
    config = notices.guard(run.read_config, {})
    shown = _trajectories(run, seed, notices)
    context = {
        "name": run.name,
        "config": config,
        "config_text": yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        "facts": _facts(config),
        "status": _status(config, lines),
        "held_out": summary.held_out_changes(lines),
        "training": summary.training_change(lines, "success/mean", "training"),
        "environments": summary.environment_changes(lines),
        "totals": _totals(lines),
        "plots": [svg.plot(chart) for chart in charts(lines)],
        "divergences": notices.guard(lambda: _divergences(run), None),
        "timings": summary.timing_rows(lines),
        "stops": summary.stop_rows(lines),
        "tools": summary.tool_rows(lines),
        "censoring": censoring_rows(lines),
        "fates": list(Fate),
        "evaluations": notices.guard(lambda: _evaluations(run), []),
        "trajectories": shown,
        "notices": notices.messages,
        "svg": svg,
    }
    atomic_write(run.report_path, _page(context))
    return run.report_path


def _page(context: dict[str, Any]) -> str:
    folder = files("agentrl.telemetry") / "templates"
    style, script, template = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js", "report.html.j2")
    )
    # Autoescape is the guard against markup in the output of tools; the policy is the second one:
    # no script but ours runs, and nothing is loaded from anywhere.
    environment = Environment(
        autoescape=True,
        finalize=_printable,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": svg.number, "duration": duration, "percent": _percent}
    environment.filters["env_label"] = env_label
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string(template).render(
        **context, style=Markup(style), script=Markup(script), script_sha256=digest
    )


def _printable(value: Any) -> Any:
    """Show control and bidirectional characters of foreign text instead of obeying them."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _facts(config: dict[str, Any]) -> list[tuple[str, str]]:
    """The settings that a reader looks for first; those that are not there are left out."""
    wanted = [
        ("environment", ("env", "id")),
        ("environments", ("env", "mix")),
        ("model", ("model", "path")),
        ("advantage", ("algo", "advantage")),
        ("loss", ("algo", "loss")),
        ("prompts per step", ("trainer", "prompts_per_step")),
        ("samples per prompt", ("rollout", "n")),
        ("learning rate", ("actor", "lr")),
        ("temperature", ("rollout", "temperature")),
        ("max turns", ("rollout", "max_turns")),
        ("failure policy", ("failure", "policy")),
        ("seed", ("trainer", "seed")),
    ]
    mix = _lookup(config, ("env", "mix")) or []
    if mix and all(_lookup(item, ("algo", "advantage")) for item in mix):
        wanted = [fact for fact in wanted if fact[0] != "advantage"]  # nobody's
    found = [(label, _lookup(config, path)) for label, path in wanted]
    return [(label, _fact(value)) for label, value in found if value not in (None, "", [])]


def _fact(value: Any) -> str:
    """A setting as text; of the entries of a mix, names and weights."""
    if not isinstance(value, list):
        return str(value)
    return ", ".join(_entry(item) if isinstance(item, dict) else str(item) for item in value)


def _entry(item: dict[str, Any]) -> str:
    """An environment of a mix, with its estimator where it has one of its own."""
    text = f"{item.get('name') or item.get('id')} × {item.get('weight', 1):g}"
    own = _lookup(item, ("algo", "advantage"))
    return f"{text} ({own})" if own else text


def _status(config: dict[str, Any], lines: Lines) -> dict[str, Any]:
    done = int(lines[-1]["step"]) if lines else 0
    total = _lookup(config, ("trainer", "total_steps"))
    total = total if isinstance(total, int) and total > 0 else None  # 0: trainer.epochs decides
    return {"done": done, "total": total, "finished": total is not None and done >= total}


def _lookup(config: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = config
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _totals(lines: Lines) -> dict[str, Any]:
    count = summary.total(lines, "trajectories/count")
    return {
        "seconds": summary.total(lines, "timing_s/step"),
        "step_s": summary.mean(lines, "timing_s/step"),
        "tokens_per_s": summary.mean(lines, "throughput/rollout_tokens_per_s"),
        "trajectories": count,
        "failed": summary.total(lines, "trajectories/failed"),
        "drift": summary.total(lines, "render/drift"),
        "wall_clock_limited": summary.total(lines, "wall_clock_limited"),
    }


def _evaluations(run: RunDir) -> list[EvaluationTable]:
    """Compare the first stored evaluation of every split, and environment, with its last.

    The test split comes first.
    """
    stored: dict[int, list[Trajectory]] = {}
    steps = run.eval_steps()
    for step in {*steps[:1], *steps[-1:]}:
        stored[step] = read_trajectories(run.eval_path(step))
    found: dict[tuple[str, str], dict[int, list[Trajectory]]] = {}
    for step in sorted(stored):
        for trajectory in stored[step]:
            key = (_split_of(trajectory), trajectory.env_id)
            found.setdefault(key, {}).setdefault(step, []).append(trajectory)
    several = len({env for _, env in found}) > 1
    return [
        _evaluation_table(split, env_label(env) if several else "", found[split, env])
        for split, env in sorted(found)
    ]


def _split_of(trajectory: Trajectory) -> str:
    """Groups of evaluations are named ``eval-<split>-<index>``, or with a name in between."""
    name = trajectory.group_id.removeprefix("eval-").partition("-")[0]
    return {"val": "validation"}.get(name, name)


def _evaluation_table(split: str, env: str, stored: dict[int, list[Trajectory]]) -> EvaluationTable:
    first_step, last_step = min(stored), max(stored)
    last = stored[last_step]
    first = stored[first_step] if first_step < last_step else []
    before = {result.stratum: result for result in evaluate_strata(first)}
    common = _scored_tasks(first) & _scored_tasks(last)
    return EvaluationTable(
        split=split,
        env=env,
        first_step=first_step,
        last_step=last_step,
        rows=[
            EvaluationRow(stratum=result.stratum, last=result, first=before.get(result.stratum))
            for result in evaluate_strata(last)
        ],
        gain=paired_gain(first, last) if len(common) > 1 else None,
        gain_tasks=len(common),
    )


def _scored_tasks(trajectories: list[Trajectory]) -> set[tuple[str, str]]:
    return {(item.env_id, item.task.id) for item in trajectories if item.score is not None}


def _trajectories(run: RunDir, seed: int, notices: Notices) -> list[ShownTrajectory]:
    if not run.trajectory_steps():
        return []
    chooser = random.Random(seed)
    decoder = notices.guard(lambda: open_decoder(run), None)
    return [
        *notices.guard(lambda: last_step_trajectories(run, decoder, chooser), []),
        *notices.guard(lambda: newest_failure(run, decoder), []),
        *notices.guard(lambda: first_step_trajectory(run, decoder, chooser), []),
    ]


def _divergences(run: RunDir) -> dict[str, Any] | None:
    """Where engine and trainer part in the last step whose tokens the trainer has scored."""
    steps = run.trajectory_steps()
    if not steps:
        return None
    found = run_divergences(run, steps[-1], top=_MAX_DIVERGENCES, decoder=quiet_decoder(run))
    return {"step": steps[-1], "rows": found, "threshold": DEFAULT_THRESHOLD} if found else None


def _percent(fraction: float) -> str:
    """``12 %``, with a decimal below ten."""
    value = 100 * fraction
    return f"{value:.0f} %" if value >= 9.95 or value == 0 else f"{value:.1f} %"
