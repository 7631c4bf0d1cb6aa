"""What a sandbox costs: starts, calls, fresh runs per second and memory, arm beside arm.

A start is from asking for a sandbox to the first result of a cell in it. A fresh run is: create a
box, run one cell, close the box (which waits until it is dead). All arms run in one call, so that
they share the machine's state; below 90 seconds on two cores.

    python benchmarks/sandbox_rate.py [--runs 600] [--live 500] [--json]
        [--docker $(scripts/docker_engine.sh start)]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl_sandboxes.docker import DockerBackend
from agentrl_sandboxes.docker.image import build_local_image
from agentrl_sandboxes.local import LocalBackend
from agentrl_sandboxes.local.launcher import find_bwrap, find_python

from agentrl.sandbox.base import SandboxBackend, SandboxLimits

LIMITS = SandboxLimits()
PROGRAM = "sum(range(10))"
CONCURRENCY = 64
# The least that a fresh isolated run can cost: fork into new namespaces, leave, be reaped.
_LIMIT_PROGRAM = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
flags = 0x10000000 | 0x20000000 | 0x20000 | 17
number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
runs, width = int(sys.argv[1]), 16
start, live = time.perf_counter(), 0
for _ in range(runs):
    if live == width: os.wait(); live -= 1
    if libc.syscall(number, flags, 0, 0, 0, 0) == 0: os._exit(0)
    live += 1
while live: os.wait(); live -= 1
print(runs / (time.perf_counter() - start))
"""


@dataclass(slots=True, kw_only=True)
class Row:
    """One arm; None where a figure does not apply."""

    arm: str
    start_p50_ms: float
    start_p95_ms: float
    call_p50_ms: float | None = None
    call_p99_ms: float | None = None
    runs_per_s_1: float | None = None
    runs_per_s_64: float | None = None


def percentile(values_s: list[float], percent: int) -> float:
    """In milliseconds."""
    ordered = sorted(values_s)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] * 1e3


async def time_each(one: Callable[[], Awaitable[object]], count: int) -> list[float]:
    """Seconds that each of `count` runs took, one after the other."""
    found = []
    for _ in range(count):
        start = time.perf_counter()
        await one()
        found.append(time.perf_counter() - start)
    return found


async def rate(one: Callable[[], Awaitable[object]], runs: int, concurrency: int) -> float:
    """Runs per second with so many in flight."""
    remaining = iter(range(runs))

    async def worker() -> None:
        for _ in remaining:
            await one()

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return runs / (time.perf_counter() - start)


async def measure_backend(
    arm: str,
    backend: SandboxBackend,
    *,
    starts: int,
    runs: int,
    refill_s: float,
    calls: int = 1000,
) -> Row:
    """Measure a backend; `refill_s` is the pause between two starts, for a reserve to fill."""
    await backend.start()

    async def fresh() -> None:
        box = await backend.create(LIMITS)
        assert (await box.run_code(PROGRAM)).result == "45"
        await box.close()

    await rate(fresh, 8, 4)
    firsts = []
    for _ in range(starts):
        await asyncio.sleep(refill_s)
        start = time.perf_counter()
        box = await backend.create(LIMITS)
        assert (await box.run_code(PROGRAM)).result == "45"
        firsts.append(time.perf_counter() - start)
        await box.close()
    box = await backend.create(LIMITS)
    await box.run_code("x = 1")
    warm = await time_each(lambda: box.run_code("x + 1"), calls)
    await box.close()
    row = Row(
        arm=arm,
        start_p50_ms=percentile(firsts, 50),
        start_p95_ms=percentile(firsts, 95),
        call_p50_ms=percentile(warm, 50),
        call_p99_ms=percentile(warm, 99),
        runs_per_s_1=await rate(fresh, max(8, runs // 8), 1),
        runs_per_s_64=await rate(fresh, runs, CONCURRENCY),
    )
    await backend.close()
    return row


async def measure_cold() -> Row:
    """Ours from nothing: the zygote's start with it."""

    async def whole() -> None:
        backend = LocalBackend(idle_boxes=0)
        await backend.start()
        box = await backend.create(LIMITS)
        assert (await box.run_code(PROGRAM)).result == "45"
        firsts.append(time.perf_counter())
        await backend.close()

    firsts: list[float] = []
    found = []
    for _ in range(15):
        start = time.perf_counter()
        await whole()
        found.append(firsts[-1] - start)
    return Row(
        arm="ours, backend and first box",
        start_p50_ms=percentile(found, 50),
        start_p95_ms=percentile(found, 95),
    )


async def measure_process(arm: str, command: list[str], runs: int) -> Row:
    """A new process per run, which prints its result and ends."""
    identity = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}

    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd="/", **identity
        )
        output, _ = await process.communicate()
        assert output == b"45\n"

    await rate(run, 4, 2)
    alone = await time_each(run, max(20, runs // 10))
    return Row(
        arm=arm,
        start_p50_ms=percentile(alone, 50),
        start_p95_ms=percentile(alone, 95),
        runs_per_s_1=1 / statistics.mean(alone),
        runs_per_s_64=await rate(run, max(CONCURRENCY, runs // 4), CONCURRENCY),
    )


def process_commands() -> dict[str, list[str]]:
    """A plain Python, and one in a bubblewrap of its own."""
    plain = [find_python(), "-I", "-S", "-c", f"print({PROGRAM})"]
    sandbox = [find_bwrap(), "--unshare-all", "--unshare-user", "--die-with-parent", "--clearenv"]
    sandbox += ["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"]
    sandbox += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"]
    sandbox += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/box"]
    sandbox += ["--chdir", "/box", "--cap-drop", "ALL"]
    return {"plain subprocess, no isolation": plain, "cold bubblewrap": [*sandbox, *plain]}


async def measure_live(count: int) -> dict[str, float]:
    """Memory of so many boxes that live at once, each after its first cell."""
    backend = LocalBackend(idle_boxes=0)
    await backend.start()
    zygote, group = backend._zygote, backend._group
    assert zygote is not None and group is not None
    at_once = asyncio.Semaphore(16)

    async def open_one():
        async with at_once:
            box = await backend.create(LIMITS)
            assert (await box.run_code(PROGRAM)).result == "45"
            return box

    start = time.perf_counter()
    boxes = await asyncio.gather(*(open_one() for _ in range(count)))
    opening_s = time.perf_counter() - start
    pids = descendants(zygote.inner_pid)
    found = {
        "boxes": float(count),
        "processes": float(len(pids)),
        "Pss of all [MiB]": sum(pss_kb(pid) for pid in pids) / 1024,
        "opening them [s]": opening_s,
    }
    for place in group._places:
        usage = place.folder / ("memory.usage_in_bytes" if place.version == 1 else "memory.current")
        if usage.exists():
            found["control group, with kernel memory [MiB]"] = int(usage.read_text()) / 2**20
    start = time.perf_counter()
    await asyncio.gather(*(box.close() for box in boxes))
    found["closing them [s]"] = time.perf_counter() - start
    await backend.close()
    return found


def descendants(root: int) -> set[int]:
    """A process and all below it."""
    parent_of = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            parent_of[int(name)] = int(stat.rpartition(")")[2].split()[1])
    found, grew = {root}, True
    while grew:
        more = {pid for pid, parent in parent_of.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return found


def pss_kb(pid: int) -> int:
    """Memory of a process, with its share of pages that others map too."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def measure_limit(runs: int) -> float:
    """Rate of clone into new namespaces and exit, from a bare interpreter."""
    done = subprocess.run(
        [find_python(), "-I", "-S", "-c", _LIMIT_PROGRAM, str(runs)],
        capture_output=True,
        check=True,
    )
    return float(done.stdout)


async def measure_all(runs: int, docker: str | None) -> list[Row]:
    """Every arm in turn; `docker` is the address of an engine."""
    rows = [
        await measure_process(arm, command, runs) for arm, command in process_commands().items()
    ]
    rows.append(await measure_cold())
    for arm, idle, refill_s in (
        ("ours, forked when asked", 0, 0.01),
        ("ours, from the pool", 4, 0.05),
    ):
        ours = LocalBackend(idle_boxes=idle)
        rows.append(await measure_backend(arm, ours, starts=60, runs=runs, refill_s=refill_s))
    if docker is not None:
        image = build_local_image(base_url=docker)
        for arm, idle, refill_s in (("docker", 0, 0.0), ("docker, pool of 8", 8, 2.0)):
            containers = DockerBackend(base_url=docker, image=image, idle_boxes=idle)
            rows.append(
                await measure_backend(
                    arm, containers, starts=8, runs=max(16, runs // 20), refill_s=refill_s
                )
            )
    return rows


def show(rows: list[Row], limit: float, live: dict[str, float]) -> None:
    """Print the table; targets stand in the last line."""
    columns = [*asdict(rows[0])][1:]
    print(f"{'arm':34s}" + "".join(f"{name:>15s}" for name in columns))
    for row in rows:
        cells = (getattr(row, name) for name in columns)
        print(f"{row.arm:34s}" + "".join(f"{'-' if c is None else f'{c:.2f}':>15s}" for c in cells))
    print(f"limit: clone into namespaces and exit, {limit:.0f} per second")
    print("live at once: " + ", ".join(f"{name} {value:,.1f}" for name, value in live.items()))
    print(
        "wanted: call p50 < 1 ms; cold start p50 < 80 ms, from the pool < 5 ms; >= 300 runs/s at 64"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=600)
    parser.add_argument("--live", type=int, default=500, help="boxes that live at once")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--docker", metavar="ADDRESS", help="measure containers of this engine, too (unix://…)"
    )
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # one descriptor per box
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    load_before, start = os.getloadavg()[0], time.perf_counter()
    rows = asyncio.run(measure_all(options.runs, options.docker))
    limit = measure_limit(options.runs)
    live = asyncio.run(measure_live(options.live))
    context = {
        "cores": len(os.sched_getaffinity(0)),
        "load_1min_before": round(load_before, 2),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "took_s": round(time.perf_counter() - start),
    }
    if options.json:
        print(json.dumps({"context": context, "rows": [asdict(row) for row in rows],
                          "limit_per_s": limit, "live": live}))  # fmt: skip
        return
    print("  ".join(f"{key}={value}" for key, value in context.items()))
    show(rows, limit, live)


if __name__ == "__main__":
    sys.exit(main())
