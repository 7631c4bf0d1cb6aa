"""From trained weights to the first token under them, in a run's own parts.

The training engine, the replicas of the rollout engine and the weight sync of ``agentrl train``,
opened from the same settings. A round begins when the training engine is idle (its optimizer step
has returned, and its kernels have ended), publishes its weights under a new version, and asks every
replica for one token; it ends when all tokens are there, each of that version.

* ``sync``: until the weights are served and their checksums were compared.
* ``first token``: until every replica has given a token of the new version.
* ``floor``: reading the float32 weights once and writing them twice in the dtype served, at the
  rate of a copy within the device.

Run: ``python benchmarks/first_token.py --env guess_number rollout=vllm [SETTING ...] [--rounds 10]
[--sleep] [--json]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from contextlib import AsyncExitStack

import torch

from agentrl.config.load import load
from agentrl.engines import engine_specs, open_engines
from agentrl.plan import make_plan
from agentrl.playground import open_playground
from agentrl.rollouts import LocalRollouts
from agentrl.telemetry.run_dir import RunDir
from agentrl.types import GenerateRequest, SamplingParams


async def measure(options: argparse.Namespace) -> dict:
    config = load([f"env.id={options.env}", *options.settings])
    plan = make_plan(config)
    plan.num_steps = 1
    async with AsyncExitStack() as stack:
        ground = await stack.enter_async_context(
            open_playground(config, plan.environments, examples=plan.examples)
        )
        run_dir = RunDir(options.run_dir)
        specs = engine_specs(config, plan, ground.model, run_dir)
        actor = (await open_engines(config, specs, stack))["actor"]
        weights = LocalRollouts(ground, config, {}).weights(actor)
        found: dict[str, list[float]] = {"sync": [], "first token": [], "sleep": [], "wake": []}
        num_bytes = 0.0
        for version in range(1, options.rounds + 3):
            if options.sleep:
                begin = time.perf_counter()
                await ground.engine.sleep(2)
                found["sleep"].append(time.perf_counter() - begin)
                begin = time.perf_counter()
                await ground.engine.wake()
                found["wake"].append(time.perf_counter() - begin)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            begin = time.perf_counter()
            metrics = await weights.publish(version=version)
            found["sync"].append(time.perf_counter() - begin)
            await asyncio.gather(
                *(
                    one_token(ground.engine, version, i)
                    for i in range(4 * config.rollout.replicas_per_gpu)
                )
            )
            found["first token"].append(time.perf_counter() - begin)
            num_bytes = metrics["weight_sync/bytes"]
    result = {"device": device(), "torch": torch.__version__, "bytes": num_bytes}
    for name, seconds in found.items():
        if kept := seconds[2:]:  # channels are opened in the first ones
            result[name] = {
                "median_ms": round(1e3 * statistics.median(kept), 2),
                "min_ms": round(1e3 * min(kept), 2),
                "max_ms": round(1e3 * max(kept), 2),
            }
    result["floor_ms"] = round(1e3 * copy_seconds(num_bytes) * 2, 2)
    return result


async def one_token(engine, version: int, index: int) -> None:
    result = await engine.generate(
        GenerateRequest(
            prompt_ids=[3 + (index * 7 + i) % 40 for i in range(16)],
            sampling=SamplingParams(max_tokens=1, seed=index),
            session_id=f"{version}-{index}",
        )
    )
    assert result.policy_version == [version], (result.policy_version, version)


def copy_seconds(num_bytes: float) -> float:
    """Seconds that a copy of so many bytes takes within the device."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.randint(0, 255, (int(num_bytes),), dtype=torch.uint8, device=where)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        if where == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best


def device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--env", default="guess_number")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--run-dir", default="runs/first_token")
    parser.add_argument("--sleep", action="store_true", help="sleep and wake before each round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:12} {value}")


if __name__ == "__main__":
    main()
