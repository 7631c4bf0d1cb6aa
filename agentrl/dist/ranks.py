"""Where a training process stands among the others, and how they find each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from agentrl.dist.layout import layout_problems
from agentrl.errors import ConfigError, WorkerError, WorkerTimeout


@dataclass(slots=True, frozen=True, kw_only=True)
class Ranks:
    """One process's place: by itself, or in the default process group.

    Weights are sharded over all ranks, those of one sequence included; rows are dealt out to
    data-parallel ranks. See :mod:`agentrl.dist.layout`.
    """

    device: torch.device
    """On which this rank computes."""
    rank: int = 0
    world_size: int = 1
    shard_size: int = 0
    """Ranks that share one copy of the weights; 0: all."""
    sequence_parallel: int = 1
    """Ranks that share a sequence: they get the same rows."""
    mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)
    """Over which weights are sharded, [world_size], or replicated and sharded, [replicas,
    shard_size]; None without a process group."""
    sequence_group: ProcessGroup | None = field(default=None, compare=False, repr=False)
    """Ranks of this rank's sequences; None where nobody shares them."""

    @classmethod
    def single(cls, device: torch.device | str) -> Ranks:
        """Return the place of a process without others."""
        return cls(device=torch.device(device))

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks: as many parts as there are of a batch."""
        return self.world_size // self.sequence_parallel

    @property
    def dp_rank(self) -> int:
        """Which part of a batch is this rank's."""
        return self.rank // self.sequence_parallel

    @property
    def sequence_rank(self) -> int:
        """Which part of every sequence is this rank's; 0 where nobody shares them."""
        return self.rank % self.sequence_parallel

    def arranged(self, *, shard_size: int, sequence_parallel: int, role: str = "actor") -> Ranks:
        """Return this place under an engine's settings, with the meshes for them.

        All ranks call it together, in the same order. Arrangements are kept: a second role of the
        same settings shares the first one's process groups.

        Raises:
            ConfigError: they do not divide the number of ranks.
        """
        problems = layout_problems(
            role,
            num_ranks=self.world_size,
            shard_size=shard_size,
            sequence_parallel=sequence_parallel,
        )
        if found := list(problems):
            raise ConfigError("\n".join(found))
        place = replace(self, shard_size=shard_size, sequence_parallel=sequence_parallel)
        if not dist.is_initialized():
            return place
        mesh, group = _arrangement(place)
        return replace(place, mesh=mesh, sequence_group=group)

    def largest(self, value: int) -> int:
        """Return the largest ``value`` of all ranks, which call it together."""
        if self.world_size == 1:
            return value
        # On the CPU: the device's queue of kernels is not waited for.
        number = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)


_ARRANGEMENTS: dict[tuple[str, int, int], tuple[DeviceMesh, ProcessGroup | None]] = {}


def _arrangement(place: Ranks) -> tuple[DeviceMesh, ProcessGroup | None]:
    shard_size = place.shard_size or place.world_size
    key = (place.device.type, shard_size, place.sequence_parallel)
    if key not in _ARRANGEMENTS:
        everyone = torch.arange(place.world_size)
        if shard_size == place.world_size:
            mesh = DeviceMesh(place.device.type, everyone, mesh_dim_names=("shard",))
        else:
            names = ("replicate", "shard")
            grid = everyone.view(-1, shard_size)
            mesh = DeviceMesh(place.device.type, grid, mesh_dim_names=names)
        group: ProcessGroup | None = None
        if place.sequence_parallel > 1:
            found, _ = dist.new_subgroups(place.sequence_parallel)
            assert isinstance(found, ProcessGroup), "this rank is in one of them"
            group = found
        _ARRANGEMENTS[key] = (mesh, group)
    return _ARRANGEMENTS[key]


def join_ranks(
    address: str,
    *,
    rank: int,
    world_size: int,
    device: torch.device | str,
    timeout_s: float,
) -> Ranks:
    """Enter the default process group, gloo on the CPU and NCCL on CUDA, and return one's place.

    Args:
        address: where ranks meet: ``tcp://host:port``, on which rank 0 listens, or
            ``file:///path`` on a file system that all of them see.
        rank: of this process, from 0.
        world_size: processes that come.
        device: of this process; made the current one.
        timeout_s: within which all must have come, and later every collective be done.

    Raises:
        WorkerTimeout: not all of them came in time.
        WorkerError: the address cannot be used.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    started = time.monotonic()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo",
            init_method=address,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, TimeoutError) as error:
        waited_s = time.monotonic() - started
        kind = WorkerTimeout if waited_s >= timeout_s else WorkerError
        raise kind(
            f"rank {rank} of {world_size} waited {waited_s:.0f} s at {address} for the others: "
            f"{error}. Look whether all ranks started and reach that address"
        ) from error
    return Ranks(device=device, rank=rank, world_size=world_size)


def group_of_one(device: torch.device) -> None:
    """Make a default process group of this process alone, unless there is one."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(f"{device.type}:{backend}", store=HashStore(), rank=0, world_size=1)


def leave_ranks() -> None:
    """Leave the default process group, if there is one. Safe to repeat."""
    _ARRANGEMENTS.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
