from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.telemetry.console import RichTracker, duration, sparkline
from agentrl.telemetry.tracker import TrackedRun

METRICS = {
    "success/mean": 0.5,
    "reward/mean": 0.625,
    "turns/mean": 2.4,
    "throughput/rollout_tokens_per_s": 12345.6,
    "stop_reason/terminated": 0.9,
    "stop_reason/max_turns": 0.1,
    "val/code_sandbox/success": 0.75,
    "val/code_sandbox/success_low": 0.7,
    "val/code_sandbox/success_high": 0.8,
}


def _run(keep: int | None = None) -> TrackedRun:
    return TrackedRun(directory=Path("x"), name="demo", total_steps=10, keep_through_step=keep)


def _console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100), out


def test_without_a_terminal_it_is_one_plain_line_per_step() -> None:
    console, out = _console(terminal=False)
    now = [0.0]
    tracker = RichTracker(_run(), console=console, clock=lambda: now[0])
    for step in (1, 2):
        now[0] += 30.0
        tracker.log(METRICS, step)
    tracker.close()
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "\x1b" not in out.getvalue()
    for part in (
        "step 2/10",
        "success 0.500",
        "reward 0.625",
        "turns 2.4",
        "tokens/s 12,346",
        "terminated 90% max_turns 10%",
        "val code_sandbox 0.750 [0.700, 0.800]",
        "eta 4m00s",
    ):
        assert part in lines[1]


def test_continuous_integration_gets_plain_lines_even_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CI", "1")
    console, out = _console(terminal=True)
    tracker = RichTracker(_run(), console=console)
    tracker.log(METRICS, 1)
    tracker.close()
    assert out.getvalue().count("\n") == 1


def test_panel_on_a_terminal_keeps_the_last_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    console, out = _console(terminal=True)
    tracker = RichTracker(_run(), console=console)
    tracker.log(METRICS, 1)
    tracker.log({"success/mean": 1.0, "stop_reason/terminated": 1.0}, 2)
    tracker.close()
    tracker.close()
    last = out.getvalue()[out.getvalue().rindex("╭") :]
    assert "demo" in last and "step 2/10" in last
    assert "0.750 [0.700, 0.800]" in last
    assert "▅█" in last or "▄█" in last
    assert "max_turns" not in last


def test_quiet_shows_nothing() -> None:
    console, out = _console(terminal=True)
    tracker = RichTracker(_run(), quiet=True, console=console)
    tracker.log(METRICS, 1)
    tracker.close()
    assert out.getvalue() == ""


def test_time_left_after_a_resume_counts_only_the_new_steps() -> None:
    console, out = _console(terminal=False)
    now = [0.0]
    tracker = RichTracker(_run(keep=8), console=console, clock=lambda: now[0])
    now[0] = 60.0
    tracker.log({}, 9)
    assert "eta 1m00s" in out.getvalue()


@pytest.mark.parametrize("width", [20, 300])
def test_the_last_line_promises_nothing_and_no_line_is_padded(width: int) -> None:
    out = io.StringIO()
    tracker = RichTracker(_run(), console=Console(file=out, force_terminal=False, width=width))
    for step in (9, 10):
        tracker.log(METRICS, step)
    before, last = out.getvalue().splitlines()
    assert "eta" in before and "eta" not in last
    assert all(line == line.rstrip() for line in (before, last))


def test_an_environment_given_by_import_path_is_named_by_its_class() -> None:
    console, out = _console(terminal=False)
    RichTracker(_run(), console=console).log({"val/./glossary.py:Glossary/success": 0.5}, 1)
    assert "val Glossary 0.500" in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_hostile_text_is_no_markup_and_odd_values_are_left_out(terminal: bool) -> None:
    console, out = _console(terminal=terminal)
    tracker = RichTracker(_run(), console=console)
    tracker.log({"stop_reason/[red]x[/nope]": 1.0, "success/mean": float("nan")}, 1)
    tracker.close()
    assert "[red]x[/nope]" in out.getvalue()
    assert "success" not in out.getvalue()


def test_sparkline_and_duration() -> None:
    assert sparkline([0.0, 0.5, 1.0, 7.0, -1.0]) == "▁▅██▁"
    assert len(sparkline([0.1] * 1000, width=40)) == 40
    assert [duration(s) for s in (0.44, 42, 185, 7620)] == ["0.4s", "42s", "3m05s", "2h07m"]
