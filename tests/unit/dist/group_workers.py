"""Workers for the tests of groups: importable, so that another process builds them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.batch import Batch, RowView
from agentrl.dist.dispatch import (
    AllToAll,
    Call,
    Collective,
    DataParallel,
    Layout,
    OneToAll,
    RankZero,
)
from agentrl.dist.engine import LossFn
from agentrl.dist.ranks import Ranks
from agentrl.dist.worker import Worker, register
from agentrl.errors import CheckpointError


class Reversed:
    """A dispatch of one's own: entries go to the ranks back to front."""

    def split(self, call: Call, layout: Layout) -> Sequence[Call | None]:
        last = layout.world_size - 1
        return [call.map(lambda value, r=rank: value[last - r]) for rank in range(last + 1)]

    def collect(self, results: Sequence[Any], calls: Sequence[Call | None], layout: Layout) -> Any:
        return list(results)[::-1]


class Unpicklable(CheckpointError):
    def __init__(self, *args: object) -> None:
        super().__init__("cannot cross")
        self.lock = threading.Lock()


class TwoArguments(CheckpointError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"cannot cross, {one} and {two}")


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Probe(Worker):
    def __init__(self, ranks: Ranks, offset: int = 0) -> None:
        super().__init__(ranks)
        self.offset = offset
        self.num_calls = 0

    @register(dispatch=OneToAll())
    def add(self, value: int) -> int:
        self.num_calls += 1
        return value + self.offset + self.ranks.rank

    @register(dispatch=AllToAll())
    def own(self, value: str) -> str:
        return f"{self.ranks.rank}:{value}"

    @register(dispatch=RankZero())
    def first(self) -> int:
        self.num_calls += 1
        return self.ranks.rank

    @register(dispatch=Collective())
    def total(self) -> int:
        number = torch.tensor(self.ranks.rank + 1)
        if self.ranks.world_size > 1:
            dist.all_reduce(number)
        return int(number)

    @register(dispatch=Reversed())
    def mirrored(self, value: int) -> int:
        return 10 * value + self.ranks.rank

    @register(dispatch=DataParallel())
    def twice(self, batch: RowView) -> dict[str, Any]:
        own = batch.load()
        return {"ids": own.tokens["ids"] * 2, "rows": own.num_rows, "pid_max": os.getpid()}

    @register(dispatch=OneToAll())
    def overwrite(self, weights: dict[str, Tensor]) -> float:
        total = float(weights["a"].sum())
        weights["a"].zero_()
        return total

    @register(dispatch=OneToAll())
    def environment(self, names: Sequence[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    @register(dispatch=OneToAll())
    def niceness(self) -> int:
        return os.nice(0)

    @register(dispatch=OneToAll())
    def process(self) -> int:
        return os.getpid()

    @register(dispatch=OneToAll())
    def calls(self) -> int:
        return self.num_calls

    @register(dispatch=RankZero())
    def make_batch(self, lengths: list[int]) -> Batch:
        return Batch.from_rows({"ids": [torch.arange(n) for n in lengths]})

    @register(dispatch=DataParallel())
    def memory(self, batch: RowView) -> dict[str, Any]:
        """Whether the rank reads the batch where it lies, and in whose memory that is."""
        value = batch.base.tokens["ids"]
        return {"in_store": _mapped_file(value.data_ptr())}

    @register(dispatch=OneToAll(), timeout_s=60)
    def fail_on(self, rank: int, message: str) -> None:
        """One rank fails while the others wait for it."""
        if self.ranks.rank == rank:
            raise RuntimeError(message)
        dist.barrier()

    @register(dispatch=OneToAll(), timeout_s=60)
    def fail_oddly(self, how: str) -> Any:
        """What comes back cannot be pickled, built again or shown."""
        if how == "result":
            return threading.Lock()
        raise {"pickle": Unpicklable, "arguments": TwoArguments, "text": Speechless}[how](1, 2)

    @register(dispatch=OneToAll(), timeout_s=4)
    def hang_on(self, rank: int) -> None:
        if self.ranks.rank == rank:
            _stuck_for_good()
        dist.barrier()

    def unregistered(self) -> None:
        """Nothing that a group calls."""


def _stuck_for_good() -> None:
    time.sleep(600)


def _mapped_file(address: int) -> list[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, flags, _, _, _, *path = line.split()
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address < end:
            return [flags, *path]
    return []


@dataclass
class FakeSave:
    directory: Path
    fails: bool

    def wait(self) -> None:
        time.sleep(0.1)
        if self.fails:
            raise CheckpointError("no space left")
        (self.directory / "state").write_text("1")


class FakeEngine:
    """Counts what it is asked; its weights are one number."""

    def __init__(self, ranks: Ranks, weight: float, disk_full: bool) -> None:
        self.ranks = ranks
        self.weight = torch.tensor([weight])
        self.bias = torch.arange(4.0)
        self.disk_full = disk_full
        self.num_updates = 0
        self.num_skipped = 0
        self.on_device = True

    def train_mini_batch(
        self,
        batch: Batch | RowView,
        loss_fn: LossFn,
        *,
        tokens_per_micro_batch: int,
        keep: Sequence[str] = (),
    ) -> dict[str, Any]:
        own = batch.select(range(batch.num_rows))
        scores = {"logprobs": own.tokens["ids"].float()}
        loss, metrics = loss_fn(scores, own)
        self.num_updates += 1
        total = {name: float(value) for name, value in metrics.items()}
        total |= {f"{name}/tokens": scores[name] for name in keep}
        return total | {"loss": float(loss), "lr": 0.5, "grad_norm": 1.0, "skipped": 0.0}

    def infer_batch(
        self,
        batch: Batch | RowView,
        *,
        tokens_per_micro_batch: int,
        fields: Sequence[str] = ("logprobs",),
    ) -> dict[str, Tensor]:
        ids = batch.select(range(batch.num_rows)).tokens["ids"]
        return {name: ids * self.weight for name in fields}

    def export_params(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight
        yield "bias", self.bias

    def save(self, directory: Path) -> FakeSave:
        return FakeSave(directory, self.disk_full)

    def load(self, directory: Path) -> None:
        if not (directory / "state").exists():
            raise CheckpointError(f"{directory.name} has no state")
        self.num_updates = int((directory / "state").read_text())

    def export_pretrained(self, directory: Path) -> None:
        (directory / f"model-{self.ranks.rank}").write_text(str(float(self.weight)))

    def onload(self) -> None:
        self.on_device = True

    def offload(self) -> None:
        self.on_device = False


@dataclass
class FakeBuilder:
    """Builds an engine for ``EngineWorker``; can be pickled."""

    weight: float = 1.0
    disk_full: bool = False

    def __call__(self, ranks: Ranks) -> FakeEngine:
        return FakeEngine(ranks, self.weight, self.disk_full)


@dataclass
class SumLoss:
    fields: tuple[str, ...] = ("logprobs",)

    def __call__(
        self, scores: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        rows = torch.tensor(batch.num_rows)
        return scores["logprobs"].sum(), {"rows": rows, "ratio_max": rows}
