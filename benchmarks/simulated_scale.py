"""Schedules at scale in virtual time: thousands of replicas, 100,000 episodes at once.

Producer, buffer, groups, routing and the trainer's loop are the real code; engines are on the token
clock, the optimizer sleeps, and episodes are played without the agent loop's own work per turn
(``--agent-loop`` plays them with it).

* ``scale``: CPU time of the whole simulation per episode, by episodes in flight; with Python's
  garbage collector, whose full passes visit everything that is alive, and without.
* ``makespan``: one batch of episodes, ours against a barrier per turn and fixed batches, and the
  optimum ``max(work / capacity, longest episode)``.
* ``steps``: a training run, synchronous and with ``max_staleness`` 1 and 4, in order and with
  groups that overtake.

Run: ``python benchmarks/simulated_scale.py [--part scale,makespan,steps] [--episodes 100000]
[--replicas 1024] [--agent-loop] [--json]``
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from agentrl.bench.clocked_run import ClockedResult, ClockedRun, train_on_clock
from agentrl.bench.results import table
from agentrl.bench.schedule_arms import Schedule
from agentrl.rollout.buffer import Lookahead
from agentrl.testing.tables import lognormal
from agentrl.testing.token_clock import ClockSettings
from agentrl.testing.virtual_time import run_virtual

SAMPLES = 8
NUM_SLOTS = 64
TOKENS_PER_ID = 50
TOOL = {"latency_median_s": 0.05, "latency_p99_s": 3.0, "latency_limit_s": 30.0}
SIZES = (1_000, 10_000, 100_000)


def base(options: argparse.Namespace, *, episodes: int, replicas: int) -> ClockedRun:
    return ClockedRun(
        prompts_per_step=episodes // SAMPLES,
        num_samples=SAMPLES,
        num_steps=1,
        num_replicas=max(replicas, 1),
        update_s=1.0,
        env={"num_turns": 2, "num_tasks": 1024, **TOOL},
        engine=ClockSettings(tokens_per_id=TOKENS_PER_ID, num_slots=NUM_SLOTS),
        short_episodes=not options.agent_loop,
    )


def ahead(run: ClockedRun, bound: int, window: int = 0) -> ClockedRun:
    rules = Lookahead(
        prompts_per_step=run.prompts_per_step,
        max_staleness=bound,
        window=window,
        total_steps=run.num_steps,
    )
    return replace(run, lookahead=rules)


def played(run: ClockedRun) -> tuple[ClockedResult, float]:
    """Run; returns the CPU seconds too."""
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        result = run_virtual(train_on_clock(run, Path(folder)))
        return result, time.process_time() - start


def scale(options: argparse.Namespace) -> dict[str, Any]:
    """All episodes in flight at once: two steps, the second one ahead of the first."""
    rows = []
    for episodes in (size for size in SIZES if size <= options.episodes):
        replicas = options.replicas * episodes // options.episodes
        run = base(options, episodes=episodes // 2, replicas=replicas)
        run = ahead(replace(run, num_steps=2), 1)
        cpu_ms: dict[bool, float] = {}
        shown: list[Any] = []
        for collects in (True, False):
            (gc.enable if collects else gc.disable)()
            result, cpu_s = played(run)
            assert result.staleness <= 1
            number = result.work.num_trajectories
            cpu_ms[collects] = 1e3 * cpu_s / number
            shown = [number, run.num_replicas, result.seconds]
        gc.enable()
        rows.append([*shown, cpu_ms[True], cpu_ms[False]])
    headers = ("episodes in flight", "replicas", "virtual s", "CPU ms per episode", "without gc")
    return {"headers": headers, "rows": rows}


def makespan(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for name, episodes, replicas in (
        ("tail-bound", options.episodes, options.replicas),
        ("work-bound", 4096, 1),
    ):
        run = base(options, episodes=episodes, replicas=replicas)
        run = replace(run, update_s=0.0, engine=replace(run.engine, sync_s=0.0))
        if name == "work-bound":
            lengths = lognormal(median=1000, p99=10_000)
            run = replace(run, engine=replace(run.engine, lengths=lengths))
        tokens = set()
        for schedule in reversed(Schedule):
            result, _ = played(replace(run, schedule=schedule))
            tokens.add(result.work.sampled_tokens)
            busy = result.busy_s / result.seconds
            rows.append(
                [f"{name} {schedule}", result.seconds, result.optimum_s, result.over_optimum, busy]
            )
        assert len(tokens) == 1, "arms did different work"
    headers = ("one batch of episodes", "virtual s", "optimum", "times optimum", "engines busy")
    return {"headers": headers, "rows": rows}


def steps(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    run = replace(base(options, episodes=512, replicas=8), num_steps=16)
    arms = {
        "batch": replace(run, schedule=Schedule.BATCH),
        "barrier per turn": replace(run, schedule=Schedule.BARRIER),
        "async, staleness 0": run,
        "staleness 1": ahead(run, 1),
        "staleness 1, overtaking": ahead(run, 1, window=64),
        "staleness 4": ahead(run, 4),
        "staleness 4, overtaking": ahead(run, 4, window=256),
    }
    first = None
    for name, arm in arms.items():
        result, _ = played(arm)
        first = first or result.step_s
        rows.append(
            [name, result.step_s, first / result.step_s, result.staleness, result.over_optimum]
        )
    headers = ("16 steps of 512 episodes", "s per step", "speed-up", "staleness", "times optimum")
    return {"headers": headers, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", default="scale,makespan,steps")
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--replicas", type=int, default=1024)
    parser.add_argument("--agent-loop", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts = {"scale": scale, "makespan": makespan, "steps": steps}
    found = {name: parts[name](options) for name in options.part.split(",")}
    if options.json:
        print(json.dumps({"settings": vars(options), "found": found}))
        return
    print("\n\n".join(table(part["headers"], part["rows"]) for part in found.values()))


if __name__ == "__main__":
    main()
