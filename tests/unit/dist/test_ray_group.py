"""Groups on a real Ray cluster of this machine: two ranks, gloo. They start in seconds each."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle
from ray.util.placement_group import placement_group_table

from agentrl.algo.loss import PolicyLoss
from agentrl.algo.policy_losses import Vanilla
from agentrl.batch import Batch
from agentrl.dist.build import EngineSpec, build_engine
from agentrl.dist.config import ActorConfig, PoolConfig
from agentrl.dist.engine_worker import EngineWorker
from agentrl.dist.group_engine import GroupEngine
from agentrl.dist.ray_cluster import ray_cluster
from agentrl.dist.ray_group import RayOptions, RayWorkerGroup
from agentrl.dist.ray_transport import store
from agentrl.dist.worker_group import LocalWorkerGroup, WorkerGroup
from agentrl.errors import CheckpointError, ConfigError, WorkerError, WorkerLost, WorkerTimeout
from agentrl.model.load import LoadedModel
from agentrl.testing.tokenizer import make_tokenizer

from . import group_workers
from .group_workers import FakeBuilder, Probe, SumLoss

pytestmark = pytest.mark.timeout(150)
POOL = PoolConfig(ranks=2, cpus_per_rank=1.0)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ["NCCL_DEBUG"] = "WARN"
    with ray_cluster(num_cpus=3, object_store_bytes=200 << 20) as nodes:
        assert [node.cpus for node in nodes] == [3.0]
        cloudpickle.register_pickle_by_value(group_workers)
        yield
        cloudpickle.unregister_pickle_by_value(group_workers)
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def shared() -> Iterator[list[RayWorkerGroup]]:
    """The group of all tests that leave it whole, if it is there; whoever needs room ends it."""
    groups: list[RayWorkerGroup] = []
    yield groups
    for group in groups:
        group.shutdown()


@pytest.fixture
def probes(shared: list[RayWorkerGroup]) -> RayWorkerGroup:
    """The group of all tests that leave it whole."""
    if not shared:
        shared.append(RayWorkerGroup(Probe, 5, pool=POOL))
    return shared[0]


@pytest.fixture
def room(shared: list[RayWorkerGroup]) -> None:
    """See that the whole cluster is free."""
    while shared:
        shared.pop().shutdown()
    assert nothing_is_reserved()


def ids_batch(*lengths: int) -> Batch:
    return Batch.from_rows({"ids": [torch.arange(n) + 100 * n for n in lengths]})


def refuses_calls(group: WorkerGroup, *, because: str) -> None:
    with pytest.raises(WorkerError, match=f"the group has ended: .*{because}"):
        group.call("process")


def nothing_is_reserved() -> bool:
    """Whether Ray has all its CPUs back, which it says a moment late."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        removed = all(group["state"] == "REMOVED" for group in placement_group_table().values())
        if removed and ray.available_resources().get("CPU") == 3.0:
            return True
        time.sleep(0.1)
    return False


def test_ways_to_dispatch(probes: RayWorkerGroup) -> None:
    assert probes.call("add", 2) == [7, 8]
    assert probes.call("own", ["a", "b"]) == ["0:a", "1:b"]
    assert probes.call("first") == 0
    assert probes.call("total") == 3  # both ranks took part
    assert probes.call("mirrored", [1, 2]) == [11, 20]


def test_data_parallel_calls_come_back_in_the_order_of_the_batch(probes: RayWorkerGroup) -> None:
    batch = ids_batch(3, 50, 1, 0, 20)
    got = probes.call("twice", batch)
    assert torch.equal(got["ids"], batch.tokens["ids"] * 2)
    assert got["rows"] == 5
    got["ids"].zero_()  # the caller's own memory


def test_an_empty_rank_is_called_too(probes: RayWorkerGroup) -> None:
    got = probes.call("twice", ids_batch(4))
    assert got["rows"] == 1 and len(got["ids"]) == 4


def test_ranks_read_a_batch_where_it_lies(probes: RayWorkerGroup) -> None:
    for flags, path, *_ in probes.call("memory", ids_batch(30_000, 50_000))["in_store"]:
        assert "s" in flags and "plasma" in path  # shared memory of the store


def test_results_go_from_producer_to_consumer_by_reference(probes: RayWorkerGroup) -> None:
    (made,) = probes.keep("make_batch", [3, 4, 5])
    assert isinstance(made.reference, ray.ObjectRef)
    got = probes.call("twice", made)
    want = torch.cat([torch.arange(n) * 2 for n in (3, 4, 5)])
    assert torch.equal(got["ids"], want)
    assert torch.equal(
        probes.call("twice", probes.put(ids_batch(2, 3)))["ids"][:2] // 2 % 100, torch.arange(2)
    )
    assert probes.call("add", ray.put(10)) == [15, 16]  # Ray's own references are resolved


def test_bulk_is_stored_once_and_every_rank_may_write_to_its_own(
    probes: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, stored = ray.put, []
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    weights = {"a": torch.ones(100_000), "b": torch.zeros(3, dtype=torch.bfloat16)}
    assert probes.call("overwrite", weights) == [100_000.0] * 2
    assert len(stored) == 1
    probes.call("twice", ids_batch(3, 5))
    assert len(stored) == 2
    probes.call("overwrite", {"a": torch.ones(3)})  # small: goes along with the call
    assert len(stored) == 2


def test_ranks_get_the_settings_of_the_driver(probes: RayWorkerGroup) -> None:
    got = probes.call("environment", ["NCCL_DEBUG"])
    assert got == [{"NCCL_DEBUG": "WARN"}] * 2


def test_ranks_get_as_much_of_a_core_as_other_processes(probes: RayWorkerGroup) -> None:
    assert probes.call("niceness") == [os.nice(0)] * 2


def test_calls_from_two_threads_reach_all_ranks_in_one_order(probes: RayWorkerGroup) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.extend(probes.call("total") for _ in range(20)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [3] * 40  # crossed collectives would hang


def test_a_mistake_of_the_caller_leaves_the_group_whole(probes: RayWorkerGroup) -> None:
    with pytest.raises(AttributeError, match="unregistered"):
        probes.call("unregistered")
    with pytest.raises(ValueError, match="sequence of 2 entries"):
        probes.call("own", ["a"])
    assert probes.call("first") == 0


def test_a_group_that_finds_no_room_says_what_is_free(probes: RayWorkerGroup) -> None:
    with pytest.raises(WorkerTimeout, match="2 ranks with 1 CPUs and 0 GPUs each .* 1 CPUs"):
        RayWorkerGroup(Probe, pool=POOL, options=RayOptions(start_timeout_s=1.0))
    assert probes.call("first") == 0


def test_an_error_comes_at_once_and_ends_the_group(room: None) -> None:
    group = RayWorkerGroup(Probe, pool=POOL)
    with pytest.raises(WorkerError) as found:  # rank 0 sits in a barrier meanwhile
        group.call("fail_on", 1, "boom")
    text = str(found.value)
    assert text.startswith("rank 1 of 2 (process ")
    assert "Probe.fail_on raised RuntimeError: boom" in text
    assert "in fail_on\n    raise RuntimeError(message)" in text
    refuses_calls(group, because="fail_on: WorkerError: rank 1 of 2")
    assert nothing_is_reserved()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("pickle", "rank 0 of 1 .*Probe.fail_oddly raised Unpicklable: cannot cross\n"),
        ("arguments", "rank 0 of 1 .*Probe.fail_oddly raised TwoArguments: cannot cross, 1 and 2"),
        ("text", "rank 0 of 1 .*raised Speechless, whose message cannot be shown\n"),
        ("result", "rank 0 of 1 .*fail_oddly failed outside the worker"),
    ],
)
def test_what_cannot_cross_is_told_in_words(room: None, how: str, said: str) -> None:
    group = RayWorkerGroup(Probe, pool=PoolConfig(ranks=1))
    with pytest.raises(WorkerError, match=said) as found:
        group.call("fail_oddly", how)
    if how != "result":
        assert "in fail_oddly" in str(found.value)  # where it was raised


def killed_while_called(group: RayWorkerGroup) -> None:
    pid = group.call("process")[1]
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    group.call("hang_on", 1)


@pytest.mark.parametrize(
    ("worker_fails", "kind", "said"),
    [
        (killed_while_called, WorkerLost, r"rank 1 of 2 \(process \d+ on .*hang_on: Worker exit"),
        (
            lambda group: group.call("hang_on", 1),
            WorkerTimeout,
            r"hang_on was not done after 4 s: late is rank 1 of 2 .* in _stuck_for_good "
            r"\(group_workers.py:\d+\); waiting for it in a collective: rank 0",
        ),
    ],
    ids=["killed", "hangs"],
)
def test_a_rank_that_fails_is_named(
    room: None, worker_fails: Callable[[RayWorkerGroup], Any], kind: type[Exception], said: str
) -> None:
    group = RayWorkerGroup(Probe, pool=POOL)
    with pytest.raises(kind, match=said) as found:
        worker_fails(group)
    if kind is WorkerTimeout:
        assert "in barrier" in str(found.value)  # the stack of the rank that waits, too
    refuses_calls(group, because=kind.__name__)
    group.shutdown()
    assert nothing_is_reserved()


def test_a_worker_that_cannot_be_built_is_no_group(room: None) -> None:
    with pytest.raises(WorkerError, match=r"Probe.__init__ raised TypeError: .*unexpected keyword"):
        RayWorkerGroup(Probe, pool=PoolConfig(ranks=1), offfset=1)
    assert nothing_is_reserved()


def test_two_roles_share_the_processes_of_a_group(room: None, tmp_path: Path) -> None:
    builders = {"actor": FakeBuilder(2.0), "critic": FakeBuilder(3.0)}
    group = RayWorkerGroup(EngineWorker, builders, pool=POOL)
    actor, critic = GroupEngine(group, "actor"), GroupEngine(group, "critic")
    batch = ids_batch(3, 5)
    assert [one["roles"] for one in group.call("describe")] == [["actor", "critic"]] * 2
    got = actor.train_mini_batch(batch, SumLoss(), tokens_per_micro_batch=8)
    assert got["loss"] == batch.tokens["ids"].sum() and got["rows"] == 2
    assert (got["lr"], got["ratio_max"]) == (0.5, 1)  # not added up over ranks
    assert (actor.num_updates, critic.num_updates) == (1, 0)
    values = critic.infer_batch(batch, tokens_per_micro_batch=8, fields=("values",))["values"]
    assert torch.equal(values, batch.tokens["ids"] * 3.0)
    assert [name for name, _ in actor.export_params()] == ["weight", "bias"]
    actor.save(tmp_path).wait()
    critic.load(tmp_path)
    assert critic.num_updates == 1
    with pytest.raises(CheckpointError, match="nowhere has no state") as found:
        critic.load(tmp_path / "nowhere")  # comes as itself, not as WorkerError
    assert "EngineWorker.load raised CheckpointError" in str(found.value.__cause__)
    refuses_calls(group, because="load: CheckpointError")
    assert nothing_is_reserved()


def test_two_ranks_train_as_one_process_does(
    room: None, tiny_model: Callable[..., Any], ragged_batch: Callable[..., Batch]
) -> None:
    batch = ragged_batch()
    num_tokens = int(batch.tokens["loss_mask"].sum())
    loss = PolicyLoss(token_loss=Vanilla(), num_tokens=num_tokens)
    model = LoadedModel(model=tiny_model(), tokenizer=make_tokenizer(), source="tiny")
    spec = EngineSpec(
        role="actor", model=store(model), config=ActorConfig(lr=1e-2), total_updates=3
    )
    ranks = RayWorkerGroup(EngineWorker, {"actor": partial(build_engine, spec)}, pool=POOL)
    spec.model = model
    alone = LocalWorkerGroup(EngineWorker, {"actor": partial(build_engine, spec)})
    for _ in range(2):
        one, two = (
            GroupEngine(group).train_mini_batch(batch, loss, tokens_per_micro_batch=24)
            for group in (alone, ranks)
        )
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    want, got = (dict(GroupEngine(group).export_params()) for group in (alone, ranks))
    assert want.keys() == got.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=2e-5)
    ranks.shutdown()
    ranks.shutdown()
    refuses_calls(ranks, because="shut down")


def test_inside_a_connection_nothing_is_started_or_ended() -> None:
    with ray_cluster("10.255.255.1:6379") as nodes:
        assert len(nodes) == 1
    assert ray.is_initialized()


def test_an_address_without_ray_is_refused() -> None:
    ray.shutdown()
    with (
        pytest.raises(ConfigError, match=r"127\.0\.0\.1:9'.*nobody listens"),
        ray_cluster("127.0.0.1:9"),
    ):
        pass
    with pytest.raises(ConfigError, match="Ray Client copies"), ray_cluster("ray://127.0.0.1:9"):
        pass
