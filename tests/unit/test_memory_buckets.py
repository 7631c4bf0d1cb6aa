"""Buckets of weights in the plan: where they lie, and how many bytes they are."""

from __future__ import annotations

import pytest

from agentrl.config.load import load
from agentrl.dist.memory import BUCKETS, plan_memory
from agentrl.dist.model_shape import ModelShape, model_shape
from agentrl.memory_buckets import plan_buckets
from agentrl.memory_plan import plan_run
from agentrl.model.tiny import tiny_config

MIB = 2**20
RAY = ["cluster=ray"]
GPUS = [*RAY, "cluster.gpus=1"]
APART = [*GPUS, "cluster.gpus_per_rollout_worker=1"]


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return model_shape(tiny_config(640))


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "sending", "receiving"),
    [
        ([], False, 0, 0),
        (["rollout=vllm"], False, 2, 0),
        (["rollout=vllm"], True, 2, 0),
        (RAY, False, 2, 0),
        (GPUS, True, 2, 0),
        (APART, True, 2, 2),
        ([*RAY, "weight_sync.transport=gloo"], False, 2, 2),
        ([*APART, "weight_sync.transport=gloo"], True, 0, 0),
        ([*RAY, "weight_sync.transport=object_store"], False, 0, 0),
    ],
)
def test_two_buckets_lie_where_weights_are_packed_and_where_they_are_broadcast_to(
    shape: ModelShape, overrides: list[str], on_gpu: bool, sending: int, receiving: int
) -> None:
    config = load(["env.id=guess_number", *overrides])
    found = plan_buckets(config, shape, on_gpu=on_gpu)
    whole = 4 * shape.num_params  # a smaller model is one bucket
    assert (found.sending, found.receiving) == (sending * whole, receiving * whole)


def test_a_bucket_is_as_large_as_the_setting_or_the_largest_tensor(shape: ModelShape) -> None:
    def sending(*overrides: str) -> int:
        config = load(["env.id=guess_number", "rollout=vllm", *overrides])
        return plan_buckets(config, shape, on_gpu=False).sending

    assert 4 * shape.num_params > MIB
    assert sending("weight_sync.bucket_mb=1") == 2 * MIB
    half = sending("trainer.deterministic=false")
    assert half == 2 * 2 * shape.num_params  # vLLM serves bfloat16 then


def test_the_plan_of_a_run_holds_them_once_on_a_host_with_several_ranks() -> None:
    config = load(["env.id=guess_number", *RAY, "placement.pools.train.ranks=2"])
    planned = plan_run(config)
    assert planned.request is not None
    (device,) = plan_memory(planned.request).devices
    roles = {role.role: role.standing for role in device.roles}
    whole = 4 * planned.request.models[0].shape.num_params
    assert roles["actor"][BUCKETS] == 2 * whole and BUCKETS not in roles["rollout"]
