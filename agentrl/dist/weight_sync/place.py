"""Where those who send and receive weights are, and which transport that allows."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentrl.dist.weight_sync.config import AUTO, OBJECT_STORE
from agentrl.errors import EngineError
from agentrl.weights.served import WeightSpec


@dataclass(slots=True, frozen=True, kw_only=True)
class Place:
    """Machine and GPU of a process."""

    host: str
    gpu: str | None
    """Its first GPU, by the name that the machine has for it; None where it computes on CPUs."""

    @classmethod
    def of_this_process(cls, *, on_gpu: bool) -> Place:
        """Say where this process is, without touching a GPU."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        return cls(host=socket.gethostname(), gpu=visible[0].strip() if on_gpu else None)


@dataclass(slots=True, frozen=True, kw_only=True)
class Target:
    """A rollout worker that takes weights."""

    place: Place
    num_receivers: int
    """Processes that load weights there: ranks of engines."""
    num_gpus: int
    """That it sees, for all of them."""
    specs: tuple[WeightSpec, ...]

    def num_members(self, transport: str) -> int:
        """Return how many of its processes open a channel of a transport."""
        return 1 if self.relays(transport) else self.num_receivers

    def relays(self, transport: str) -> bool:
        """Whether one process takes buckets for the engines that share its GPU."""
        return transport == "nccl" and self.num_receivers > self.num_gpus


def num_gpus() -> int:
    """Return how many GPUs torch sees; occupies none."""
    return torch.cuda.device_count()


def choose_transport(wanted: str, ranks: Sequence[Place], targets: Sequence[Target]) -> str:
    """Return the transport for where everybody is.

    Args:
        wanted: ``weight_sync.transport``.
        ranks: of training, by rank.
        targets: at least one.

    Raises:
        EngineError: the one that is wanted cannot work there; says why.
    """
    problems = {
        "cuda_ipc": _ipc_problem(ranks, targets),
        "nccl": _nccl_problem(ranks, targets),
        "shm": _shm_problem(ranks, targets),
    }
    if wanted == AUTO:
        return next((name for name, problem in problems.items() if not problem), OBJECT_STORE)
    if problem := problems.get(wanted):
        raise EngineError(
            f"weight_sync.transport={wanted}: {problem}; set weight_sync.transport=auto"
        )
    return wanted


def senders_of(transport: str, ranks: Sequence[Place], targets: Sequence[Target]) -> list[int]:
    """Return the rank that sends to each target."""
    if transport != "cuda_ipc":
        return [0] * len(targets)
    by_place = {place: rank for rank, place in reversed(list(enumerate(ranks)))}
    return [by_place[target.place] for target in targets]


def _ipc_problem(ranks: Sequence[Place], targets: Sequence[Target]) -> str | None:
    for target in targets:
        if target.place.gpu is None or target.place not in ranks:
            return (
                f"a rollout worker is on {_words(target.place)}, where no rank trains "
                f"({', '.join(_words(place) for place in ranks[:4])})"
            )
        if target.num_gpus > 1:
            return f"an engine of a rollout worker is spread over {target.num_gpus} GPUs"
    return None


def _nccl_problem(ranks: Sequence[Place], targets: Sequence[Target]) -> str | None:
    places = [ranks[0], *(target.place for target in targets)]
    if any(place.gpu is None for place in places):
        return "rank 0 and every rollout worker need a GPU"
    if len(set(places)) < len(places):
        return "two of rank 0 and the rollout workers share a GPU, which nccl cannot use"
    if any(target.num_receivers > target.num_gpus > 1 for target in targets):
        return "several engines of a rollout worker are spread over the same GPUs"
    return None


def _shm_problem(ranks: Sequence[Place], targets: Sequence[Target]) -> str | None:
    if any(target.place.gpu is not None for target in targets):
        return "a rollout worker is on a GPU"
    elsewhere = {target.place.host for target in targets} - {ranks[0].host}
    return f"rollout workers run on {sorted(elsewhere)[0]}, rank 0 not" if elsewhere else None


def _words(place: Place) -> str:
    return f"{place.host} {'CPU' if place.gpu is None else f'GPU {place.gpu}'}"
