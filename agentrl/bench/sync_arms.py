"""Ways from a trainer's weights to those that another process serves.

Each arm ends in the same state: the receiver holds what the trainer has, in bfloat16, and the
checksums of both sides were found equal.

* ``floor``: one ``copy_`` of as many bytes, within one device. Not a sync.
* ``tensors``: one message per tensor: its bytes through a pipe; on a GPU an IPC handle each.
* ``packed`` (GPU): buckets in new memory of torch's allocator, whose handles are opened each time.
* ``shm``, ``cuda_ipc``: buckets in two slots that are mapped once, packed while others are loaded.
* ``gloo``, ``nccl`` (two GPUs): the same by broadcast.
* ``delta``: numbers and values of the elements that changed since the last update. Keeps a copy of
  what was sent.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.multiprocessing  # registers how tensors of a GPU go through pipes
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.testing.weight_sink import ProcessSink, TensorSink
from agentrl.weights.channels import open_sender
from agentrl.weights.channels.base import Packer
from agentrl.weights.checksum import SliceSums, StreamSums, TensorSlice
from agentrl.weights.plan import BucketPlan
from agentrl.weights.push import StreamSource, push
from agentrl.weights.served import ServedWeights, WeightSpec, refuse_other_weights

MIB = 1 << 20
SERVED = "bfloat16"


@dataclass(slots=True, frozen=True, kw_only=True)
class SyncSettings:
    """What is sent."""

    shape: str = "small"
    """A name of :data:`SHAPES`."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    bucket_mb: int = 64
    """MiB that are packed together."""
    lr: float = 1e-6
    """Of the optimizer, which decides how many elements change."""

    def __post_init__(self) -> None:
        """Refuse what there is not."""
        if self.shape not in SHAPES:
            raise ConfigError(f"--shape {self.shape}: known are {', '.join(SHAPES)}")
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"--device {self.device}: known are cpu, cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch sees no GPU here; leave it out, or write cpu")
        if not (self.lr >= 0 and math.isfinite(self.lr)):
            raise ConfigError(f"--lr {self.lr}: must be a finite number of at least 0")


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
    "tiny": Shape(64, 2, 2, 2, 32, 128, 512),
    "small": Shape(512, 8, 8, 2, 64, 1536, 32_000),
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 64, 4864, 151_936),
    "qwen3-1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151_936),
}
"""The sizes of `random_policy.SHAPES`, without transformers: every receiver loads this module."""


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

    def __init__(self, options: SyncSettings, stack: ExitStack) -> None:
        self.device = options.device
        self.specs = specs_of(SHAPES[options.shape])
        self.plan = BucketPlan.of(self.specs, bucket_bytes=options.bucket_mb * MIB)
        self.trainer = Trainer(self.specs, "cuda:0" if self.on_gpu else "cpu", options.lr)
        self.version = 0
        self.changed: list[float] = []
        self.stack = stack

    @property
    def on_gpu(self) -> bool:
        """Whether the trainer is."""
        return self.device == "cuda"

    def sink(self, device: str | None = None) -> ProcessSink:
        """Start a receiver."""
        found = ProcessSink(
            self.specs, device=device or ("cuda:0" if self.on_gpu else "cpu"), kind=BucketSink
        )
        self.stack.callback(found.close)
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
    """Copy as many bytes within one device."""
    device = "cuda:0" if bench.on_gpu else "cpu"
    source = torch.ones(bench.plan.num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def run() -> None:
        target.copy_(source)
        if bench.on_gpu:
            torch.cuda.synchronize()

    return run


def tensors_arm(bench: Bench) -> Arm:
    """Send one message per tensor."""
    sink = bench.sink()

    def run() -> None:
        sums = StreamSums({spec.name: SERVED for spec in bench.specs})
        for name, value in sums.watch(bench.params()):
            sink.call("load_tensor", name, value if bench.on_gpu else _bytes(value))
        bench.compare(sums, sink.call("finish_update", bench.version))

    return run


def packed_arm(bench: Bench) -> Arm:
    """Send buckets in memory that is new each time."""
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
    """Send buckets as a transport of agentrl does."""
    sink = bench.sink("cuda:1" if transport == "nccl" else None)
    device = "cuda:0" if bench.on_gpu else "cpu"
    sender = open_sender(transport, bench.plan, device=device, num_receivers=1)
    asyncio.run(sink.connect(bench.plan, sender.address))

    def run() -> None:
        source = StreamSource(bench.params(), sender)
        asyncio.run(push(source, [sink], plan=bench.plan, version=bench.version))

    return run


def delta_arm(bench: Bench) -> Arm:
    """Send what changed since the last update."""
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


def _bytes(value: Tensor) -> np.ndarray:
    return value.contiguous().view(torch.uint8).view(-1).numpy()


def arms_of(settings: SyncSettings) -> dict[str, Callable[[Bench], Arm]]:
    """Return the arms that this machine can take, the floor first."""
    on_gpu = settings.device == "cuda"
    found: dict[str, Callable[[Bench], Arm]] = {"floor": floor_arm, "tensors": tensors_arm}
    if on_gpu:
        found["packed"] = packed_arm
    names = ["cuda_ipc"] if on_gpu else ["shm", "gloo"]
    if on_gpu and torch.cuda.device_count() > 1:
        names.append("nccl")
    for name in names:
        found[name] = lambda bench, transport=name: channel_arm(bench, transport)
    return found | {"delta": delta_arm}
