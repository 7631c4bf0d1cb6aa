"""From trained weights to the first token under them, in a run's own parts.

The training engine, the replicas of the rollout engine and the weight sync of ``agentrl train``,
opened from the same settings. A round begins when the training engine is idle (its optimizer step
has returned, and its kernels have ended), publishes its weights under a new version, and asks every
replica for one token; it ends when all tokens are there, each of that version.

* ``sync``: until the weights are served and their checksums were compared.
* ``first token``: until every replica has given a token of the new version.
* ``begin``, ``buckets``, ``finish``: what the sync is made of: waiting for the engines, packing and
  loading, checksums and answers.
* ``floor``: reading the float32 weights once and writing them twice in the dtype served, at the
  rate of a copy within the device.

With ``--bucket-mb`` the same once for each size, through a channel of the benchmark's own.

Run: ``python benchmarks/first_token.py --env guess_number rollout=vllm [SETTING ...] [--rounds 10]
[--bucket-mb 128 256 1024] [--sleep] [--json]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import torch

from agentrl.config.load import load
from agentrl.engines import engine_specs, open_engines
from agentrl.plan import make_plan
from agentrl.playground import open_playground
from agentrl.rollouts import LocalRollouts
from agentrl.telemetry.run_dir import RunDir
from agentrl.types import GenerateRequest, SamplingParams
from agentrl.weights.channels import open_sender
from agentrl.weights.channels.base import Address
from agentrl.weights.plan import BucketPlan
from agentrl.weights.push import StreamSource, push
from agentrl.weights.served import ServedWeights, WeightSpec

Publish = Callable[[int], Awaitable[dict[str, float]]]
"""Version -> seconds by part."""


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the run's own way, and of every size of bucket."""
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
        num_bytes = sum(
            math.prod(s.shape) * itemsize(s.dtype) for s in ground.engine.weight_specs()
        )
        result: dict[str, Any] = {
            "device": device(),
            "torch": torch.__version__,
            "bytes": num_bytes,
            "floor_ms": round(1e3 * copy_seconds(num_bytes) * 2, 2),
        }
        found = await rounds(as_runs_do(weights), ground.engine, options, first=1)
        result |= {name: spread(seconds) for name, seconds in found.items()}
        for number, size in enumerate(options.bucket_mb, start=1):
            publish = await in_buckets(ground.engine, actor, size, stack)
            found = await rounds(publish, ground.engine, options, first=1000 * number)
            result[f"buckets of {size} MiB"] = {
                name: spread(seconds) for name, seconds in found.items()
            }
    return result


async def rounds(
    publish: Publish, engine: Any, options: argparse.Namespace, *, first: int
) -> dict[str, list[float]]:
    """Return seconds of every round, by part; two more warm up, since channels open in them."""
    found: dict[str, list[float]] = defaultdict(list)
    for version in range(first, first + options.rounds + 2):
        if options.sleep:
            found["sleep"].append(await seconds_of(engine.sleep(2)))
            found["wake"].append(await seconds_of(engine.wake()))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        parts = await publish(version)
        found["sync"].append(time.perf_counter() - begin)
        await asyncio.gather(*(one_token(engine, version, i) for i in range(options.requests)))
        found["first token"].append(time.perf_counter() - begin)
        for name, value in parts.items():
            found[name].append(value)
    return {name: seconds[2:] for name, seconds in found.items()}


def as_runs_do(weights: Any) -> Publish:
    """Return the weight sync of a run."""

    async def publish(version: int) -> dict[str, float]:
        await weights.publish(version=version)
        return {}

    return publish


async def in_buckets(engine: Any, actor: Any, size_mb: int, stack: AsyncExitStack) -> Publish:
    """Return the same over a new channel, whose parts are clocked."""
    on_gpu = torch.cuda.is_available()
    plan = BucketPlan.of(engine.weight_specs(), bucket_bytes=size_mb << 20)
    sender = open_sender(
        "cuda_ipc" if on_gpu else "shm",
        plan,
        device="cuda:0" if on_gpu else "cpu",
        num_receivers=engine.num_receivers,
    )
    stack.callback(sender.close)
    await engine.connect(plan, sender.address)

    async def publish(version: int) -> dict[str, float]:
        sink = ClockedSink(engine)
        source = StreamSource(actor.export_params(), sender)
        await push(source, [sink], plan=plan, version=version)
        return sink.seconds

    return publish


class ClockedSink:
    """A sink that notes when each part of an update has ended."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    @property
    def num_receivers(self) -> int:
        return self._sink.num_receivers

    def weight_specs(self) -> Sequence[WeightSpec]:
        return self._sink.weight_specs()

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        await self._sink.connect(plan, address)

    async def give_up_update(self, reason: str) -> None:
        await self._sink.give_up_update(reason)

    async def begin_update(self) -> None:
        await self._sink.begin_update()
        self._note("begin")

    async def load_bucket(self, index: int) -> None:
        await self._sink.load_bucket(index)
        self._note("buckets")

    async def finish_update(self, version: int) -> ServedWeights:
        served = await self._sink.finish_update(version)
        self._note("finish")
        return served

    def _note(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now


async def seconds_of(work: Awaitable[Any]) -> float:
    begin = time.perf_counter()
    await work
    return time.perf_counter() - begin


def spread(seconds: list[float]) -> dict[str, float]:
    """Return median and extremes in milliseconds."""
    return {
        "median_ms": round(1e3 * statistics.median(seconds), 2),
        "min_ms": round(1e3 * min(seconds), 2),
        "max_ms": round(1e3 * max(seconds), 2),
    }


def itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


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
    parser.add_argument("--requests", type=int, default=4, help="that each ask for one token")
    parser.add_argument("--bucket-mb", type=int, nargs="*", default=[])
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
