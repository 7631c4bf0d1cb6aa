"""From the end of an optimizer step to weights that another process serves, by transport.

A trainer (float32 weights, AdamW) steps; then a second process gets the weights in bfloat16,
writes them into the parameters it serves, and both sides' checksums are compared. What is timed
begins when ``optimizer.step`` has returned and its kernels have ended, and ends when the sums were
found equal.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from agentrl.bench.results import Arm, interleaved
from agentrl.bench.sync_arms import Arm as Run
from agentrl.bench.sync_arms import Bench, SyncSettings, arms_of
from agentrl.errors import ConfigError

FLOOR, DELTA = "floor", "delta"
_FIRST_STEADY, _PER_ROUND = 3, 2


@dataclass(slots=True, kw_only=True)
class SyncResult:
    """What the arms took."""

    arms: list[Arm]
    num_bytes: int
    num_buckets: int
    changed_share: float | None
    """Of the elements, in one step of the optimizer; None where ``delta`` was not measured."""


def measure_syncs(
    settings: SyncSettings,
    *,
    repeats: int,
    wanted: Sequence[str] = (),
    further: Mapping[str, Callable[[Bench], Run]] | None = None,
    announce: Callable[[str], None] = lambda text: None,
) -> SyncResult:
    """Take the arms in turn, after a round of warm-up in which channels are opened.

    Args:
        wanted: names of arms, besides the floor; none takes all that are possible here.
        further: arms that the caller brings.
        announce: told what goes on.

    Raises:
        ConfigError: an arm that is not possible on this machine.
        EngineError: what is served is not what was sent.
    """
    known = {**arms_of(settings), **(further or {})}
    if unknown := sorted(set(wanted) - known.keys()):
        raise ConfigError(f"--arms: {', '.join(unknown)} not possible here; known: {list(known)}")
    names = [name for name in known if not wanted or name in {FLOOR, *wanted}]
    with ExitStack() as stack:
        bench = Bench(settings, stack)
        runs: dict[str, Run] = {}
        for name in names:
            runs[name] = known[name](bench)
            announce(f"{name}: opened")
        arms = {name: Arm(name) for name in names}
        for position, name in enumerate([*names, *interleaved(names, repeats)]):
            seconds = _timed(bench, name, runs[name])
            warm_up = position < len(names)
            announce(f"{name}: {1e3 * seconds:.1f} ms{', warm-up' if warm_up else ''}")
            if not warm_up:
                arms[name].add(seconds, {"bytes": bench.plan.num_bytes})
        steady = bench.changed[_FIRST_STEADY::_PER_ROUND]
        return SyncResult(
            arms=list(arms.values()),
            num_bytes=bench.plan.num_bytes,
            num_buckets=len(bench.plan.buckets),
            changed_share=statistics.median(steady) if steady else None,
        )


def _timed(bench: Bench, name: str, run: Run) -> float:
    if name == DELTA:  # the steps before the other arms are not its own
        run()
    bench.trainer.step()
    bench.version += 1
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def rows(result: SyncResult) -> list[list[Any]]:
    """Return a line per arm: milliseconds, rate, share of the floor."""
    floor_s = next(arm.median_s for arm in result.arms if arm.name == FLOOR)
    return [
        [
            arm.name,
            1e3 * arm.median_s,
            *(1e3 * value for value in arm.range_s),
            result.num_bytes / arm.median_s / 1e9,
            floor_s / arm.median_s,
            arm.halves_differ,
        ]
        for arm in result.arms
    ]


HEADERS = ("arm", "median ms", "min", "max", "GB/s", "of floor", "A vs A")
