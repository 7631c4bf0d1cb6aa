"""The transport follows from where ranks and workers are; one that cannot work is refused."""

from __future__ import annotations

import pytest

from agentrl.dist.weight_sync.place import Place, Target, choose_transport, senders_of
from agentrl.errors import EngineError


def at(host: str, gpu: str | None = None) -> Place:
    return Place(host=host, gpu=gpu)


def on(*places: Place) -> list[Target]:
    return [Target(place=place, num_receivers=1, specs=()) for place in places]


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


def test_each_worker_hears_from_the_rank_on_its_gpu() -> None:
    assert senders_of("cuda_ipc", [A0, A1], on(A1, A0, A1)) == [1, 0, 1]
    assert senders_of("nccl", [A0, A1], on(B0, B0)) == [0, 0]
