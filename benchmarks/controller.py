"""What a call of a worker group costs on Ray: a batch to two ranks, and a call without one.

Two measures, on a local cluster with two ranks:

* ``batch``: a data-parallel call with a Batch of ``--megabytes`` against one copy of the same
  tensors into memory of the same kind. Arms, taken in turn, round after round:
  ``copy`` (``numpy.copyto`` of every tensor into memory that was written before), ``call`` (the
  whole call, ranks getting views of their rows) and ``call+read`` (each rank also copies its rows
  out, 8,192 tokens at a time, as it does between the micro-batches that it trains).
* ``empty``: a call without arguments on both ranks, one after the other.

Time is wall clock. Where other processes take the cores, the shortest of several medians is the
best guess of what an idle machine shows; both arms are treated alike, and the longest is given too.

Run: ``python benchmarks/controller.py [--megabytes 256] [--rounds 5] [--repeats 7]
[--calls 1000] [--json]``
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from agentrl.batch import Batch, RowView
from agentrl.dist.config import PoolConfig
from agentrl.dist.dispatch import DataParallel, OneToAll
from agentrl.dist.micro_batch import plan_micro_batches
from agentrl.dist.ray_cluster import ray_cluster
from agentrl.dist.ray_group import RayWorkerGroup
from agentrl.dist.worker import Worker, register

MIB = 1 << 20
FIELDS = {
    "ids": torch.int64,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "old_logprobs": torch.float32,
    "advantages": torch.float32,
    "loss_weights": torch.float32,
}
TOKENS_PER_ROW = 2048
TOKENS_PER_MICRO_BATCH = 8192


class Receiver(Worker):
    """A rank that does nothing with what it gets."""

    @register(dispatch=DataParallel())
    def take(self, batch: RowView) -> dict[str, Any]:
        return {"tokens": batch.num_tokens}

    @register(dispatch=DataParallel())
    def read(self, batch: RowView) -> dict[str, Any]:
        plan = plan_micro_batches(batch.lengths.tolist(), TOKENS_PER_MICRO_BATCH)
        return {"tokens": sum(batch.select(rows).num_tokens for rows in plan)}

    @register(dispatch=OneToAll())
    def nothing(self) -> None:
        pass


def make_batch(num_bytes: int, seed: int = 0) -> Batch:
    """Rows of lengths spread by a factor of 4, with the fields of a policy update."""
    generator = torch.Generator().manual_seed(seed)
    per_token = sum(dtype.itemsize for dtype in FIELDS.values())
    num_rows = max(2, num_bytes // per_token // TOKENS_PER_ROW)
    share = torch.rand(num_rows, generator=generator) * 1.2 + 0.4
    lengths = (share / share.sum() * (num_bytes / per_token)).long()
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_tokens = int(cu_seqlens[-1])
    return Batch(cu_seqlens, {name: torch.ones(num_tokens).to(d) for name, d in FIELDS.items()})


def seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def time_batch(
    group: RayWorkerGroup, batch: Batch, rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Return the median of ``repeats``, in seconds, of every arm in every round."""
    arrays = [value.numpy() for value in batch.tokens.values()]
    targets = [np.zeros_like(array) for array in arrays]

    def copy() -> None:
        for target, array in zip(targets, arrays, strict=True):
            np.copyto(target, array)

    arms: dict[str, Callable[[], Any]] = {
        "copy": copy,
        "call": lambda: group.call("take", batch),
        "call+read": lambda: group.call("read", batch),
    }
    for action in arms.values():
        for _ in range(3):  # the store's pages are touched for the first time
            action()
    medians: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        times: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(repeats):
            for name, action in arms.items():
                times[name].append(seconds(action))
        for name, found in times.items():
            medians[name].append(statistics.median(found))
    return medians


def time_empty(group: RayWorkerGroup, rounds: int, calls: int) -> list[float]:
    """Return the median of ``calls`` calls, in seconds, in every round."""
    for _ in range(50):
        group.call("nothing")
    return [
        statistics.median(seconds(lambda: group.call("nothing")) for _ in range(calls))
        for _ in range(rounds)
    ]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    batch = make_batch(args.megabytes * MIB)
    num_bytes = sum(value.nbytes for value in batch.tokens.values())
    with ray_cluster(num_cpus=3, object_store_bytes=12 * num_bytes + 256 * MIB):
        group = RayWorkerGroup(Receiver, pool=PoolConfig(ranks=2))
        medians = time_batch(group, batch, args.rounds, args.repeats)
        empty = time_empty(group, args.rounds, args.calls)
        group.shutdown()
    best = {name: min(found) for name, found in medians.items()}
    return {
        "megabytes": num_bytes / MIB,
        "rows": batch.num_rows,
        "load_average": os.getloadavg()[0],
        "batch_ms": {name: [1e3 * t for t in found] for name, found in medians.items()},
        "ratio": {name: best[name] / best["copy"] for name in best},
        "empty_ms": [1e3 * t for t in empty],
    }


def show(found: dict[str, Any]) -> None:
    print(f"{found['megabytes']:.0f} MiB in {found['rows']} rows to 2 ranks, milliseconds")
    print(f"{'arm':<12}{'shortest':>10}{'longest':>10}{'times copy':>12}")
    for name, times in found["batch_ms"].items():
        ratio = found["ratio"][name]
        print(f"{name:<12}{min(times):>10.1f}{max(times):>10.1f}{ratio:>12.2f}")
    times = found["empty_ms"]
    print(f"{'empty call':<12}{min(times):>10.2f}{max(times):>10.2f}")
    print(f"load average at the end: {found['load_average']:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7, help="of every arm in a round")
    parser.add_argument("--calls", type=int, default=1000, help="empty calls in a round")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args)
    print(json.dumps(found)) if args.json else show(found)


if __name__ == "__main__":
    main()
