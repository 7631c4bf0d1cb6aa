"""How many fresh, isolated runs per second, beside the other ways and the physical limit.

One run is: create a box, run one cell, close the box (which waits until it is dead). All arms
run in one call, so that they share the machine's state.

    python benchmarks/sandbox_rate.py [--runs 600] [--json]
        [--docker $(scripts/docker_engine.sh start)]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from agentrl_sandboxes.docker import DockerBackend
from agentrl_sandboxes.docker.image import build_local_image
from agentrl_sandboxes.local import LocalBackend
from agentrl_sandboxes.local.launcher import find_bwrap, find_python

from agentrl.sandbox.base import SandboxLimits

LIMITS = SandboxLimits()
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


def cpu_s() -> float:
    """CPU seconds of this process and its reaped children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def rate(one: Callable[[], Awaitable[object]], runs: int, concurrency: int) -> float:
    """Runs per second with so many in flight."""
    remaining = iter(range(runs))

    async def worker() -> None:
        for _ in remaining:
            await one()

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return runs / (time.perf_counter() - start)


async def measure_ours(runs: int) -> dict[str, float]:
    """Fresh runs at three concurrencies, grading runs, and the cost of a warm call."""
    start = time.perf_counter()
    backend = LocalBackend()
    await backend.start()
    found = {"backend start [ms]": (time.perf_counter() - start) * 1e3}

    async def fresh() -> None:
        box = await backend.create(LIMITS)
        result = await box.run_code("sum(range(10))")
        assert result.result == "45"
        await box.close()

    async def graded() -> None:
        box = await backend.create(LIMITS)
        result = await box.run_private("reply(PAYLOAD)", b"x")
        assert result.private == b"x"
        await box.close()

    await rate(fresh, 20, 4)
    before_s = cpu_s()
    total = 0
    for concurrency in (1, 8, 32):
        count = max(20, runs // 4) if concurrency == 1 else runs
        total += count
        found[f"fresh, {concurrency} at once [runs/s]"] = await rate(fresh, count, concurrency)
    found["private program, 8 at once [runs/s]"] = await rate(graded, runs, 8)
    host_s = cpu_s() - before_s
    box = await backend.create(LIMITS)
    await box.run_code("1")
    start = time.perf_counter()
    for _ in range(1000):
        await box.run_code("1")
    found["warm call [ms]"] = time.perf_counter() - start
    inside = [(await box.run_code("1")).duration_s for _ in range(1000)]
    found["warm call, inside the box [ms]"] = sorted(inside)[500] * 1e3
    found["host CPU per run [ms]"] = host_s / (total + runs) * 1e3
    await backend.close()
    return found


async def measure_processes(runs: int) -> dict[str, float]:
    """A cold bubblewrap per run, and a plain Python process per run."""
    python, program = find_python(), "print(sum(range(10)))"
    identity = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    sandbox = [find_bwrap(), "--unshare-all", "--unshare-user", "--die-with-parent", "--clearenv"]
    sandbox += ["--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin"]
    sandbox += ["--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"]
    sandbox += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/box"]
    sandbox += ["--chdir", "/box", "--cap-drop", "ALL"]

    async def run(command: list[str]) -> None:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd="/", **identity
        )
        output, _ = await process.communicate()
        assert output == b"45\n"

    cold = [*sandbox, python, "-I", "-S", "-c", program]
    plain = [python, "-I", "-S", "-c", program]
    found = {}
    for concurrency in (1, 8):
        name = f"{concurrency} at once [runs/s]"
        found[f"cold bubblewrap, {name}"] = await rate(lambda: run(cold), runs, concurrency)
        found[f"plain python, no isolation, {name}"] = await rate(
            lambda: run(plain), runs, concurrency
        )
    return found


async def measure_docker(address: str, runs: int) -> dict[str, float]:
    """Containers, each made when it is asked for, and from a reserve; what the engine costs."""
    image = build_local_image(base_url=address)
    found = {}
    for name, idle_boxes in (("docker", 0), ("docker pool of 8", 8)):
        backend = DockerBackend(base_url=address, image=image, idle_boxes=idle_boxes)
        await backend.start()
        starts: list[float] = []

        async def fresh(backend: DockerBackend = backend, starts: list[float] = starts) -> None:
            start = time.perf_counter()
            box = await backend.create(LIMITS)
            result = await box.run_code("sum(range(10))")
            starts.append(time.perf_counter() - start)
            assert result.result == "45"
            await box.close()

        for _ in range(8):  # with pauses, in which a reserve is filled again
            await fresh()
            await asyncio.sleep(idle_boxes * 0.25)
        found[f"{name}, start to first result, p50 [ms]"] = sorted(starts)[4] * 1e3
        for concurrency in (1, 8):
            found[f"{name}, {concurrency} at once [runs/s]"] = await rate(fresh, runs, concurrency)
        if not idle_boxes:
            box = await backend.create(LIMITS)
            calls = []
            for _ in range(1000):
                start = time.perf_counter()
                await box.run_code("1")
                calls.append(time.perf_counter() - start)
            found["docker, warm call, p50 [ms]"] = sorted(calls)[500] * 1e3
            found["docker, warm call, p99 [ms]"] = sorted(calls)[990] * 1e3
        await backend.close()
    return found


def measure_limit(runs: int) -> dict[str, float]:
    """Rate of clone into new namespaces and exit, from a bare interpreter."""
    done = subprocess.run(
        [find_python(), "-I", "-S", "-c", _LIMIT_PROGRAM, str(runs)],
        capture_output=True,
        check=True,
    )
    return {"limit: clone into namespaces and exit [1/s]": float(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=600)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--docker", metavar="ADDRESS", help="measure containers of this engine, too (unix://…)"
    )
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    found = asyncio.run(measure_ours(options.runs))
    found |= asyncio.run(measure_processes(max(20, options.runs // 10)))
    if options.docker:
        found |= asyncio.run(measure_docker(options.docker, max(16, options.runs // 20)))
    found |= measure_limit(options.runs)
    context = {
        "cores": len(os.sched_getaffinity(0)),
        "load_1min_before": round(load_before, 2),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    if options.json:
        print(json.dumps({"context": context, "measured": found}))
        return
    print("  ".join(f"{key}={value}" for key, value in context.items()))
    for name, value in found.items():
        print(f"{name:48s} {value:10.2f}")


if __name__ == "__main__":
    sys.exit(main())
