"""What hosting costs a step: an environment that does nothing, called directly and hosted.

Arms: a plain method call (the floor), a coroutine on the same event loop, a thread, a child
process; each with one environment at a time and with 64 at once. Times are per step, wall clock and
CPU of all processes involved, the median of several rounds that alternate between the arms.

    python benchmarks/env_host.py [--steps 2000] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

from agentrl.env.base import Env
from agentrl.env.config import EnvConfig
from agentrl.env.host import EnvHosts
from agentrl.env.hosted import Hosted
from agentrl.types import Action

Arm = Callable[[int, int], Coroutine[Any, Any, float]]
ACTION = Action(text="go", content="go")
ANSWER = ("ok", 0.0, False, False, {})


class Trivial(Env):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "hello", {}

    def step(self, action: Action) -> Any:
        return ANSWER


class TrivialAsync:
    tools = ()
    rubric = None

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "hello", {}

    async def step(self, action: Action) -> Any:
        return ANSWER

    async def close(self) -> None:
        return None


def cpu_s() -> float:
    """CPU seconds of this process; children are added when they have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


async def direct(num_envs: int, num_steps: int) -> float:
    env = Trivial()
    env.reset()
    start = time.perf_counter()
    for _ in range(num_steps):
        env.step(ACTION)
    return time.perf_counter() - start


def hosted(name: str, process: bool) -> Arm:
    async def run(num_envs: int, num_steps: int) -> float:
        hosts = EnvHosts(EnvConfig(id=f"{__file__}:{name}", process=process, processes=1))
        envs = [await hosts.open() for _ in range(num_envs)]
        for env in envs:
            await env.reset(seed=0)

        async def play(env: Hosted) -> None:
            for _ in range(num_steps // num_envs):
                await env.step(ACTION)

        start = time.perf_counter()
        await asyncio.gather(*map(play, envs))
        seconds = time.perf_counter() - start
        await hosts.close()
        return seconds

    return run


ARMS: dict[str, Arm] = {
    "direct call (floor)": direct,
    "coroutine": hosted("TrivialAsync", process=False),
    "thread": hosted("Trivial", process=False),
    "process": hosted("Trivial", process=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wall: dict[tuple[str, int], list[float]] = {}
    cpu: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for name, arm in ARMS.items():
            for num_envs in (1, 64):
                before = cpu_s()
                seconds = asyncio.run(arm(num_envs, options.steps))
                wall.setdefault((name, num_envs), []).append(seconds)
                cpu.setdefault((name, num_envs), []).append(cpu_s() - before)
    rows = [
        {
            "arm": name,
            "environments": num_envs,
            "wall_us_per_step": 1e6 * statistics.median(seconds) / options.steps,
            "cpu_us_per_step": 1e6 * statistics.median(cpu[name, num_envs]) / options.steps,
        }
        for (name, num_envs), seconds in wall.items()
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'arm':22} {'at once':>8} {'wall µs/step':>13} {'CPU µs/step':>12}")
    for row in rows:
        print(
            f"{row['arm']:22} {row['environments']:8} {row['wall_us_per_step']:13.2f} "
            f"{row['cpu_us_per_step']:12.1f}"
        )
    print("CPU includes opening: for `process`, the start of the interpreter.")


if __name__ == "__main__":
    main()
