"""From the end of an optimizer step to weights that another process serves, by transport.

A trainer (float32 weights, AdamW) steps; then a second process gets the weights in bfloat16, writes
them into the parameters it serves, and both sides' checksums are compared. What is timed begins
when ``optimizer.step`` has returned and its kernels have ended, and ends when the sums were found
equal. All arms end in the same state and include checksums and the cast. Arms are taken in turn,
round after round; medians are given, after one round of warm-up in which channels are opened.

* ``floor``: one ``copy_`` of as many bytes, within one device. Not a sync.
* ``tensors``: one message per tensor: its bytes through a pipe; on a GPU an IPC handle each.
* ``object_store``: buckets through Ray's object store.
* ``packed`` (GPU): buckets in new memory of torch's allocator, whose handles are opened each time.
* ``shm``, ``cuda_ipc``: buckets in two slots that are mapped once, packed while others are loaded.
* ``gloo``, ``nccl`` (two GPUs): the same by broadcast.
* ``delta``: numbers and values of the elements that changed since the last update. Keeps a copy of
  what was sent.

Run: ``python benchmarks/weight_sync.py [--shape small|0.5b|1.7b] [--device cpu|cuda]
[--arms shm,delta] [--bucket-mb 64] [--rounds 5] [--lr 1e-6] [--json]``
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.multiprocessing  # registers how tensors of a GPU go through pipes
from torch import Tensor

from agentrl.testing.weight_sink import ProcessSink, TensorSink
from agentrl.weights.channels import open_sender
from agentrl.weights.channels.base import Packer
from agentrl.weights.checksum import SliceSums, StreamSums, TensorSlice
from agentrl.weights.plan import BucketPlan
from agentrl.weights.push import StreamSource, push
from agentrl.weights.served import ServedWeights, WeightSpec, refuse_other_weights

MIB = 1 << 20
SERVED = "bfloat16"
BUCKET_MB = 64


@dataclass(frozen=True)
class Shape:
    """A dense decoder with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


SHAPES = {
    "small": Shape(512, 8, 8, 2, 64, 1536, 32_000),
    "0.5b": Shape(896, 24, 14, 2, 64, 4864, 151_936),
    "1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151_936),
}


def specs_of(shape: Shape) -> list[WeightSpec]:
    """Return the tensors that are served."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    named: dict[str, tuple[int, ...]] = {"embed": (shape.vocab, shape.hidden)}
    for i in range(shape.layers):
        named |= {
            f"{i}.q": (q, shape.hidden),
            f"{i}.q_bias": (q,),
            f"{i}.k": (kv, shape.hidden),
            f"{i}.k_bias": (kv,),
            f"{i}.v": (kv, shape.hidden),
            f"{i}.v_bias": (kv,),
            f"{i}.o": (shape.hidden, q),
            f"{i}.gate": (shape.ffn, shape.hidden),
            f"{i}.up": (shape.ffn, shape.hidden),
            f"{i}.down": (shape.hidden, shape.ffn),
            f"{i}.norm_1": (shape.hidden,),
            f"{i}.norm_2": (shape.hidden,),
        }
    named["norm"] = (shape.hidden,)
    return [WeightSpec(name=name, shape=dims, dtype=SERVED) for name, dims in named.items()]


class BucketSink(TensorSink):
    """Tensors that lie in one flat piece of memory for each bucket."""

    def __init__(self, specs: Sequence[WeightSpec], *, device: str = "cpu") -> None:
        super().__init__(specs, device=device)
        self.flats: list[Tensor] = []

    async def lay_out(self, plan: BucketPlan) -> None:
        """Put the tensors where the plan has them."""
        self.flats = [
            torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=self._device)
            for bucket in plan.buckets
        ]
        for bucket, flat in zip(plan.buckets, self.flats, strict=True):
            names = [piece.name for piece in bucket.slices]
            self.weights |= dict(zip(names, bucket.views(flat), strict=True))
        self._sums = SliceSums([TensorSlice.whole(value) for value in self.weights.values()])

    async def load_tensor(self, name: str, value: Any) -> None:
        """Take one tensor, as bytes or as a view of the sender's memory."""
        given = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        target = self.weights[name]
        target.view(torch.uint8).view(-1).copy_(given.view(torch.uint8).view(-1))
        self._settle()

    async def load_flat(self, index: int, flat: Tensor) -> None:
        """Take one bucket."""
        self.flats[index].copy_(flat)
        self._settle()

    async def load_changes(self, index: int, places: Any, values: Any) -> None:
        """Take what changed of one bucket."""
        if isinstance(places, np.ndarray):
            places, values = torch.from_numpy(places), torch.from_numpy(values)
        self.flats[index].view(torch.int16)[places.long()] = values
        self._settle()

    async def load_buckets(self, version: int, *buckets: Any) -> ServedWeights:
        """Take all buckets of the object store."""
        from agentrl.weights.buckets import unpack

        for name, value in unpack(buckets):
            self.weights[name].copy_(value)
        return await self.finish_update(version)

    def _settle(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()


class Trainer:
    """Weights that an optimizer steps."""

    def __init__(self, specs: Sequence[WeightSpec], device: str, lr: float) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def draw(shape: tuple[int, ...], scale: float) -> Tensor:
            return scale * torch.randn(shape, generator=generator, device=device)

        self.params = [(spec.name, draw(spec.shape, 0.02).requires_grad_()) for spec in specs]
        for spec, (_, value) in zip(specs, self.params, strict=True):
            value.grad = draw(spec.shape, 1e-3)
        values = [value for _, value in self.params]
        self._optimizer = torch.optim.AdamW(values, lr=lr, fused=True)
        self._device = device

    def step(self) -> None:
        """Step, and wait for it."""
        self._optimizer.step()
        if self._device != "cpu":
            torch.cuda.synchronize()


class Bench:
    """One trainer and one receiving process for every arm."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self.device = options.device
        self.specs = specs_of(SHAPES[options.shape])
        self.plan = BucketPlan.of(self.specs, bucket_bytes=options.bucket_mb * MIB)
        self.trainer = Trainer(self.specs, "cuda:0" if self.on_gpu else "cpu", options.lr)
        self.version = 0
        self.changed: list[float] = []
        self._stack = stack

    @property
    def on_gpu(self) -> bool:
        """Whether the trainer is."""
        return self.device == "cuda"

    def sink(self, device: str | None = None) -> ProcessSink:
        """Start a receiver."""
        found = ProcessSink(
            self.specs, device=device or ("cuda:0" if self.on_gpu else "cpu"), kind=BucketSink
        )
        self._stack.callback(found.close)
        found.call("lay_out", self.plan)
        return found

    def params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights."""
        return ((name, value.detach()) for name, value in self.trainer.params)

    def compare(self, sums: StreamSums | dict[str, int], served: ServedWeights) -> None:
        """Refuse anything but what was sent."""
        found = sums if isinstance(sums, dict) else sums.result()
        sent = ServedWeights(version=self.version, sums=found)
        refuse_other_weights(sent, served, where="the receiver")


Arm = Callable[[], None]


def floor_arm(bench: Bench) -> Arm:
    device = "cuda:0" if bench.on_gpu else "cpu"
    source = torch.ones(bench.plan.num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def run() -> None:
        target.copy_(source)
        if bench.on_gpu:
            torch.cuda.synchronize()

    return run


def tensors_arm(bench: Bench) -> Arm:
    sink = bench.sink()

    def run() -> None:
        sums = StreamSums({spec.name: SERVED for spec in bench.specs})
        for name, value in sums.watch(bench.params()):
            sink.call("load_tensor", name, value if bench.on_gpu else _bytes(value))
        bench.compare(sums, sink.call("finish_update", bench.version))

    return run


def packed_arm(bench: Bench) -> Arm:
    sink = bench.sink()

    def run() -> None:
        sums: dict[str, int] = {}
        for index, tensors in enumerate(bench.plan.fill(bench.params())):
            slot = torch.empty(bench.plan.slot_bytes, dtype=torch.uint8, device="cuda:0")
            packer = Packer(bench.plan, [slot])
            flat = packer.pack(index, tensors)
            sums |= packer.sums
            sink.call("load_flat", index, flat)
        bench.compare(sums, sink.call("finish_update", bench.version))

    return run


def channel_arm(bench: Bench, transport: str) -> Arm:
    sink = bench.sink("cuda:1" if transport == "nccl" else None)
    device = "cuda:0" if bench.on_gpu else "cpu"
    sender = open_sender(transport, bench.plan, device=device, num_receivers=1)
    asyncio.run(sink.connect(bench.plan, sender.address))

    def run() -> None:
        source = StreamSource(bench.params(), sender)
        asyncio.run(push(source, [sink], plan=bench.plan, version=bench.version))

    return run


def delta_arm(bench: Bench) -> Arm:
    sink = bench.sink()
    device = "cuda:0" if bench.on_gpu else "cpu"
    sent = [
        torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=device)
        for bucket in bench.plan.buckets
    ]
    packer = Packer(
        bench.plan,
        [torch.zeros(bench.plan.slot_bytes, dtype=torch.uint8, device=device) for _ in range(1)],
    )

    def run() -> None:
        num_changed = 0
        for index, tensors in enumerate(bench.plan.fill(bench.params())):
            now, before = (
                packer.pack(index, tensors).view(torch.int16),
                sent[index].view(torch.int16),
            )
            places = (now != before).nonzero().view(-1).int()
            values = now[places.long()]
            before.copy_(now)
            num_changed += len(places)
            given = (places, values) if bench.on_gpu else (places.numpy(), values.numpy())
            sink.call("load_changes", index, *given)
        bench.changed.append(2 * num_changed / bench.plan.num_bytes)
        bench.compare(packer.sums, sink.call("finish_update", bench.version))

    return run


def object_store_arm(bench: Bench) -> Arm:
    import ray

    from agentrl.dist.ray_cluster import ray_cluster
    from agentrl.dist.weight_sync.shipment import ship

    room = 3 * bench.plan.num_bytes + 256 * MIB
    bench._stack.enter_context(ray_cluster(num_cpus=2, object_store_bytes=room))
    gpus = 0.1 if bench.on_gpu else 0
    made: Any = ray.remote(BucketSink).options(num_gpus=gpus, num_cpus=1)
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


def _bytes(value: Tensor) -> np.ndarray:
    return value.contiguous().view(torch.uint8).view(-1).numpy()


def arms_of(options: argparse.Namespace) -> dict[str, Callable[[Bench], Arm]]:
    """Return the arms that this machine can take."""
    on_gpu = options.device == "cuda"
    found: dict[str, Callable[[Bench], Arm]] = {"floor": floor_arm, "tensors": tensors_arm}
    if importlib.util.find_spec("ray") is not None:
        found["object_store"] = object_store_arm
    if on_gpu:
        found["packed"] = packed_arm
    names = ["cuda_ipc"] if on_gpu else ["shm", "gloo"]
    if on_gpu and torch.cuda.device_count() > 1:
        names.append("nccl")
    for name in names:
        found[name] = lambda bench, transport=name: channel_arm(bench, transport)
    found["delta"] = delta_arm
    if options.arms:
        wanted = ["floor", *options.arms.split(",")]
        if unknown := sorted(set(wanted) - found.keys()):
            sys.exit(f"--arms: {', '.join(unknown)} not possible here; there are {list(found)}")
        found = {name: found[name] for name in found if name in wanted}
    return found


@dataclass(frozen=True)
class Result:
    """What an arm took."""

    arm: str
    bytes: int
    ms: float
    """Median."""
    ms_all: list[float]
    gb_per_s: float
    share_of_floor: float


def measure(options: argparse.Namespace) -> tuple[list[Result], Bench]:
    """Take the arms in turn."""
    with ExitStack() as stack:
        bench = Bench(options, stack)
        arms = {name: make(bench) for name, make in arms_of(options).items()}
        times: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(1 + options.rounds):
            for name, run in arms.items():
                if name == "delta":  # other arms' steps are not its own
                    run()
                bench.trainer.step()
                bench.version += 1
                start = time.perf_counter()
                run()
                if turn:
                    times[name].append(1e3 * (time.perf_counter() - start))
    floor = statistics.median(times["floor"])
    results = []
    for name, found in times.items():
        ms = statistics.median(found)
        rate = bench.plan.num_bytes / ms / 1e6
        rounded = [round(value, 2) for value in found]
        results.append(
            Result(name, bench.plan.num_bytes, round(ms, 2), rounded, round(rate, 3), floor / ms)
        )
    return results, bench


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--arms", default="")
    parser.add_argument("--bucket-mb", type=int, default=BUCKET_MB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results, bench = measure(options)
    timed = bench.changed[3::2]  # of single steps, after the warm-up
    changed = statistics.median(timed) if timed else None
    if options.json:
        settings = vars(options) | {"changed_share": changed}
        print(json.dumps({"settings": settings, "results": [asdict(item) for item in results]}))
        return
    megabytes = bench.plan.num_bytes / 1e6
    print(f"{options.shape}: {megabytes:.0f} MB in {len(bench.plan.buckets)} buckets")
    if changed is not None:
        print(f"{changed:.2%} of the elements change in a step of lr={options.lr:g}")
    print(f"{'arm':14} {'ms':>9} {'GB/s':>8} {'of floor':>9}")
    for item in results:
        print(f"{item.arm:14} {item.ms:9.2f} {item.gb_per_s:8.3f} {item.share_of_floor:9.1%}")


if __name__ == "__main__":
    main()
