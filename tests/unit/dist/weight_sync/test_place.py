"""The transport follows from where ranks and workers are; one that cannot work is refused."""

from __future__ import annotations

import pytest

from agentrl.dist.weight_sync.place import Place, Target, choose_transport, senders_of
from agentrl.errors import EngineError


def at(host: str, gpu: str | None = None) -> Place:
    return Place(host=host, gpu=gpu)


def on(*places: Place) -> list[Target]:
    return [Target(place=place, num_receivers=1, num_gpus=1, specs=()) for place in places]


def worker(place: Place, num_receivers: int, num_gpus: int) -> Target:
    return Target(place=place, num_receivers=num_receivers, num_gpus=num_gpus, specs=())


A, B = at("a"), at("b")
A0, A1, B0 = at("a", "0"), at("a", "1"), at("b", "0")


@pytest.mark.parametrize(
    ("ranks", "workers", "transport"),
    [
        ([A0, A1], [A0, A1], "cuda_ipc"),
        ([A0, A1], [A1, A1, A0], "cuda_ipc"),
        ([A0], [A1], "nccl"),
        ([A0, A1], [B0], "nccl"),
        ([A], [A, A], "shm"),
        ([A0], [A], "shm"),
        ([A], [A, B], "object_store"),
        ([A0], [A0, A1], "object_store"),  # shares with one, not with the other
        ([A0], [A1, A1], "object_store"),  # nccl cannot have two on one
    ],
)
def test_auto_takes_the_fastest_that_fits(
    ranks: list[Place], workers: list[Place], transport: str
) -> None:
    assert choose_transport("auto", ranks, on(*workers)) == transport


@pytest.mark.parametrize(
    ("wanted", "ranks", "workers", "message"),
    [
        ("cuda_ipc", [A0], [A1], "a rollout worker is on a GPU 1, where no rank trains"),
        ("nccl", [A0], [A0], "share a GPU"),
        ("nccl", [A], [A0], "need a GPU"),
        ("shm", [A], [B], "run on b, rank 0 not"),
    ],
)
def test_a_transport_that_cannot_work_there_is_refused(
    wanted: str, ranks: list[Place], workers: list[Place], message: str
) -> None:
    with pytest.raises(EngineError, match=f"transport={wanted}: .*{message}.*auto"):
        choose_transport(wanted, ranks, on(*workers))


@pytest.mark.parametrize(
    ("target", "transport", "num_members"),
    [
        (worker(A1, 2, 1), "nccl", 1),  # two engines on a GPU: one process receives for both
        (worker(B0, 2, 2), "nccl", 2),  # an engine of two ranks, each with its own
        (worker(A0, 2, 1), "cuda_ipc", 2),
        (worker(A0, 2, 2), "object_store", 2),  # a rank is on a GPU that the sender cannot share
        (worker(A1, 4, 2), "object_store", 4),
    ],
)
def test_engines_that_share_gpus_get_what_their_gpus_can_take(
    target: Target, transport: str, num_members: int
) -> None:
    assert choose_transport("auto", [A0], [target]) == transport
    assert target.num_members(transport) == num_members


def test_each_worker_hears_from_the_rank_on_its_gpu() -> None:
    assert senders_of("cuda_ipc", [A0, A1], on(A1, A0, A1)) == [1, 0, 1]
    assert senders_of("nccl", [A0, A1], on(B0, B0)) == [0, 0]
