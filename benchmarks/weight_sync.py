"""``agentrl bench sync`` with one more arm: buckets through Ray's object store.

Run: ``python benchmarks/weight_sync.py [--shape small|qwen2.5-0.5b|qwen3-1.7b]
[--device cpu|cuda] [--arms shm,delta] [--bucket-mb 64] [--rounds 5] [--lr 1e-6] [--json]``
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from agentrl.bench.results import table
from agentrl.bench.sync import HEADERS, measure_syncs, rows
from agentrl.bench.sync_arms import MIB, SERVED, SHAPES, Arm, Bench, BucketSink, SyncSettings
from agentrl.weights.served import ServedWeights


class UnpackingSink(BucketSink):
    """Takes all buckets at once."""

    async def load_buckets(self, version: int, *buckets: Any) -> ServedWeights:
        """Take all buckets of the object store."""
        from agentrl.weights.buckets import unpack

        for name, value in unpack(buckets):
            self.weights[name].copy_(value)
        return await self.finish_update(version)


def object_store_arm(bench: Bench) -> Arm:
    import ray

    from agentrl.dist.ray_cluster import ray_cluster
    from agentrl.dist.weight_sync.shipment import ship

    room = 3 * bench.plan.num_bytes + 256 * MIB
    bench.stack.enter_context(ray_cluster(num_cpus=2, object_store_bytes=room))
    gpus = 0.1 if bench.on_gpu else 0
    made: Any = ray.remote(UnpackingSink).options(num_gpus=gpus, num_cpus=1)
    sink = made.remote(bench.specs, device="cuda:0" if bench.on_gpu else "cpu")
    dtypes = {spec.name: SERVED for spec in bench.specs}
    size = max(bucket.num_bytes for bucket in bench.plan.buckets)

    def run() -> None:
        sent = ship(
            bench.params(), version=bench.version, bucket_bytes=size, dtypes=dtypes, put=ray.put
        )
        served: Any = ray.get(sink.load_buckets.remote(bench.version, *sent.buckets))
        bench.compare(dict(sent.sums), served)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--arms", default="")
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    settings = SyncSettings(
        shape=options.shape, device=options.device, bucket_mb=options.bucket_mb, lr=options.lr
    )
    has_ray = importlib.util.find_spec("ray") is not None
    result = measure_syncs(
        settings,
        repeats=options.rounds,
        wanted=[name for name in options.arms.split(",") if name],
        further={"object_store": object_store_arm} if has_ray else {},
        announce=partial(print, file=sys.stderr),
    )
    if options.json:
        print(json.dumps({"settings": asdict(settings), "result": asdict(result)}))
        return
    print(f"{options.shape}: {result.num_bytes / 1e6:.0f} MB in {result.num_buckets} buckets")
    if result.changed_share is not None:
        print(f"{result.changed_share:.2%} of the elements change in a step of lr={options.lr:g}")
    print(table(HEADERS, rows(result)))


if __name__ == "__main__":
    main()
