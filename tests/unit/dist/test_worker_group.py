from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.batch import Batch
from agentrl.dist.dispatch import OneToAll
from agentrl.dist.engine_worker import EngineWorker
from agentrl.dist.group_engine import GroupEngine
from agentrl.dist.worker import call_spec, register
from agentrl.dist.worker_group import LocalWorkerGroup
from agentrl.errors import CheckpointError, WorkerError

from .group_workers import FakeBuilder, Probe, Speechless, SumLoss


def ids_batch() -> Batch:
    return Batch.from_rows({"ids": [torch.arange(3), torch.arange(5)]})


def test_a_group_calls_registered_methods() -> None:
    group = LocalWorkerGroup(Probe, offset=5)
    assert group.call("add", 2) == [7]
    assert group.call("first") == 0
    got = group.call("twice", ids_batch())
    assert torch.equal(got["ids"], ids_batch().tokens["ids"] * 2) and got["rows"] == 2


def test_a_method_that_is_not_registered_is_refused_with_close_names() -> None:
    group = LocalWorkerGroup(Probe)
    with pytest.raises(AttributeError, match="Probe.totl is no method.* total"):
        group.call("totl")
    with pytest.raises(AttributeError, match="unregistered"):
        group.call("unregistered")
    assert group.call("add", 1) == [1]  # asking for it harms nothing


def test_a_registered_method_is_inherited_and_can_be_registered_anew() -> None:
    class Child(Probe):
        @register(dispatch=OneToAll(), timeout_s=7)
        def first(self) -> int:
            return 9

    assert LocalWorkerGroup(Child).call("first") == [9]
    assert call_spec(Child, "first").timeout_s == 7
    assert call_spec(Child, "add") is call_spec(Probe, "add")


def test_kept_results_go_on_as_they_are() -> None:
    group = LocalWorkerGroup(Probe)
    (made,) = group.keep("make_batch", [3, 4])
    got = group.call("twice", made)
    assert got["rows"] == 2 and len(got["ids"]) == 7


def test_the_first_error_ends_the_group_and_later_calls_name_it() -> None:
    group = LocalWorkerGroup(Probe)
    with pytest.raises(RuntimeError, match="boom") as found:
        group.call("fail_on", 0, "boom")
    assert "Probe.fail_on, rank 0 of 1" in "".join(found.value.__notes__)
    with pytest.raises(WorkerError, match="fail_on raised RuntimeError: boom"):
        group.call("add", 1)


def test_an_error_without_words_ends_the_group_all_the_same() -> None:
    group = LocalWorkerGroup(Probe)
    with pytest.raises(Speechless):
        group.call("fail_oddly", "text")
    with pytest.raises(WorkerError, match="ended: fail_oddly raised Speechless, whose message"):
        group.call("first")


def test_a_group_that_was_shut_down_says_so() -> None:
    group = LocalWorkerGroup(Probe)
    group.shutdown()
    group.shutdown()
    with pytest.raises(WorkerError, match="add: the group has ended: it was shut down"):
        group.call("add", 1)


def test_a_role_of_a_group_is_a_training_engine(tmp_path: Path) -> None:
    group = LocalWorkerGroup(EngineWorker, {"actor": FakeBuilder(2.0), "critic": FakeBuilder(3.0)})
    actor, critic = GroupEngine(group, "actor"), GroupEngine(group, "critic")
    metrics = actor.train_mini_batch(ids_batch(), SumLoss(), tokens_per_micro_batch=8)
    assert metrics["loss"] == 13 and metrics["lr"] == 0.5
    assert (actor.num_updates, critic.num_updates) == (1, 0)
    want = ids_batch().tokens["ids"]
    assert torch.equal(
        actor.infer_batch(ids_batch(), tokens_per_micro_batch=8)["logprobs"], want * 2
    )
    got = critic.infer_batch(ids_batch(), tokens_per_micro_batch=8, fields=("values",))
    assert torch.equal(got["values"], want * 3)
    actor.save(tmp_path).wait()
    critic.load(tmp_path)
    assert critic.num_updates == 1
    again = actor.train_mini_batch(
        ids_batch(), SumLoss(), tokens_per_micro_batch=8, keep=("logprobs",)
    )
    assert torch.equal(again["logprobs/tokens"], want.float())


def test_in_process_parameters_are_exported_without_a_copy() -> None:
    group = LocalWorkerGroup(EngineWorker, {"actor": FakeBuilder()})
    actor = GroupEngine(group)
    first, second = dict(actor.export_params()), dict(actor.export_params())
    assert list(first) == ["weight", "bias"]
    assert first["bias"].data_ptr() == second["bias"].data_ptr()


def test_an_export_that_was_left_early_starts_over() -> None:
    actor = GroupEngine(LocalWorkerGroup(EngineWorker, {"actor": FakeBuilder()}))
    next(actor.export_params())
    assert [name for name, _ in actor.export_params()] == ["weight", "bias"]


def test_a_save_that_fails_says_so_when_it_is_waited_for(tmp_path: Path) -> None:
    group = LocalWorkerGroup(EngineWorker, {"actor": FakeBuilder(disk_full=True)})
    save = GroupEngine(group).save(tmp_path)
    with pytest.raises(CheckpointError, match="no space left"):
        save.wait()
