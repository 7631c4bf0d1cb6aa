"""One of two ranks that save and load a small model: python resharding_ranks.py DIRECTORY RANK."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from agentrl.dist.train_state import TrainState

WORLD_SIZE = 2


def build(seed: int, rank: int, mesh: DeviceMesh | None) -> TrainState:
    """Build a model whose rows do not divide by the ranks; one tensor has a single row."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7), nn.Linear(7, 1))
    model.register_buffer("calls", torch.tensor(seed))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return TrainState(
        model=dict(model.state_dict(keep_vars=True)),
        parameters=dict(model.named_parameters()),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
        rank=rank,
        device=torch.device("cpu"),
    )


def train(state: TrainState, steps: range) -> None:
    """Update with gradients that are a function of name, step and value."""
    for step in steps:
        for index, parameter in enumerate(state.parameters.values()):
            parameter.grad = (parameter.detach() * (index + 1) + step).sin()
        state.optimizer.step()


def save(state: TrainState, directory: Path, counters: dict[str, int]) -> None:
    """Save; what happens to the weights right after must not matter."""
    if state.rank == 0:
        directory.mkdir()
    dist.barrier()
    pending = state.save(directory, counters)
    kept = {name: value.detach().clone() for name, value in state.model.items()}
    with torch.no_grad():
        for value in state.model.values():
            value.zero_()
    pending.wait()
    with torch.no_grad():
        for name, value in state.model.items():
            value.copy_(kept[name])
    dist.barrier()


def main(root: Path, rank: int) -> None:
    """Go from two ranks to one and back, and to two that hold copies."""
    address = f"file://{root / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    first = build(0, rank, mesh)
    train(first, range(2))
    torch.manual_seed(100 + rank)
    save(first, root / "two", {"num_updates": 2})
    train(first, range(2, 4))

    if rank == 0:  # one process, without sharding
        alone = build(1, 0, None)
        counters = alone.load(root / "two")
        (root / "one").mkdir()
        alone.save(root / "one", counters).wait()
    dist.barrier()

    again = build(2, rank, mesh)
    counters = again.load(root / "one")
    save(again, root / "two_again", counters)
    train(again, range(2, 4))
    save(first, root / "unbroken", {})
    save(again, root / "resumed", {})

    copies = init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=("replicate", "shard"))
    replicated = build(3, rank, copies)
    save(replicated, root / "copies", replicated.load(root / "two"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
