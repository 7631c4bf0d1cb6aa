from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentrl.telemetry import meter as meter_module
from agentrl.telemetry.meter import Meter


class Clock:
    """Advances only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_spans_are_summed_by_path_and_fit_into_the_step() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    with meter.step(3) as metrics:
        for seconds in (1.0, 2.0):
            with meter.span("collect"):
                clock.now += seconds
        with meter.span("update"):
            clock.now += 4.0
            with meter.span("logprob"):
                clock.now += 8.0
        clock.now += 0.5
        metrics |= {"reward/mean": 1.0}
    assert metrics == {
        "reward/mean": 1.0,
        "timing_s/collect": 3.0,
        "timing_s/update": 12.0,
        "timing_s/update/logprob": 8.0,
        "timing_s/step": 15.5,
    }


def test_steps_do_not_leak_into_each_other_even_after_an_error() -> None:
    clock = Clock()
    meter = Meter(clock=clock)
    with pytest.raises(KeyError), meter.step(0) as failed, meter.span("collect"):
        clock.now += 1.0
        raise KeyError
    assert failed == {"timing_s/collect": 1.0, "timing_s/step": 1.0}
    with meter.span("between"):
        clock.now += 5.0
    with meter.step(1) as metrics:
        clock.now += 2.0
    assert metrics == {"timing_s/step": 2.0}


def test_a_step_inside_a_step_is_refused() -> None:
    meter = Meter()
    with meter.step(0), pytest.raises(RuntimeError, match="still open"), meter.step(1):
        pass


def test_concurrent_tasks_keep_their_own_path() -> None:
    meter = Meter()

    async def work(name: str, ready: asyncio.Event, go: asyncio.Event) -> None:
        with meter.span(name):
            ready.set()
            await go.wait()
            with meter.span("inner"):
                await asyncio.sleep(0)

    async def main() -> dict[str, float]:
        first, second = asyncio.Event(), asyncio.Event()
        with meter.step(0) as metrics:
            await asyncio.gather(work("a", first, second), work("b", second, first))
        return metrics

    assert set(asyncio.run(main())) == {
        "timing_s/a",
        "timing_s/a/inner",
        "timing_s/b",
        "timing_s/b/inner",
        "timing_s/step",
    }


def test_trace_holds_an_event_per_span_in_lanes_that_nest(tmp_path: Path) -> None:
    clock = Clock()
    meter = Meter(trace=True, clock=clock)
    with meter.step(7), meter.span("update"):
        clock.now += 1.0
        with meter.span("logprob"):
            clock.now += 2.0
    meter.write_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = {event["name"]: event for event in trace["traceEvents"] if event["ph"] == "X"}
    assert set(events) == {"step 7", "update", "logprob"}
    assert events["logprob"]["ts"] == pytest.approx(1e6)
    assert events["logprob"]["dur"] == pytest.approx(2e6)
    assert len({event["tid"] for event in events.values()}) == 1


def test_trace_is_bounded_and_says_what_it_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter_module, "MAX_TRACE_EVENTS", 3)
    meter = Meter(trace=True)
    for _ in range(5):
        with meter.span("x"):
            pass
    meter.write_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["dropped_events"] == 2
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 3
