from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.dist.config import PlacementConfig, PoolConfig
from agentrl.dist.placement import (
    ROLES,
    NodeResources,
    PoolPlan,
    capacity_problems,
    placement_problems,
    plan_pools,
)
from agentrl.errors import ConfigError


def placed(roles: dict[str, str] | None = None, **pools: PoolConfig) -> PlacementConfig:
    return PlacementConfig(pools=pools, roles=roles or {})


def test_without_settings_all_roles_share_one_rank() -> None:
    (plan,) = plan_pools(PlacementConfig(), ["actor", "critic"])
    assert (plan.name, plan.pool.ranks, plan.roles) == ("train", 1, ("actor", "critic"))


def test_roles_go_to_their_pools() -> None:
    config = placed({"critic": "values"}, values=PoolConfig(ranks=3), train=PoolConfig(ranks=2))
    train, values = plan_pools(config, ["actor", "critic", "reference"])
    assert (train.name, train.pool.ranks, train.roles) == ("train", 2, ("actor", "reference"))
    assert (values.name, values.pool.ranks, values.roles) == ("values", 3, ("critic",))


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(ROLES), st.sampled_from("abc")))
def test_every_role_is_in_exactly_one_pool(roles: dict[str, str]) -> None:
    config = placed(roles, **{name: PoolConfig() for name in set(roles.values())})
    plans = plan_pools(config, ROLES)
    assert sorted(role for plan in plans for role in plan.roles) == sorted(ROLES)
    assert len({plan.name for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (placed({"critic": "vlaues"}, values=PoolConfig()), "no such pool; write values, or add"),
        (placed({"crtic": "train"}), "there is no such role; write critic"),
        (placed({"reward_model": "train"}), "this run has no reward_model"),
        (placed(spare=PoolConfig()), "placement.pools.spare: no role of this run lives there"),
        (placed(train=PoolConfig(ranks=0)), "ranks=0: must be at least 1"),
        (placed(train=PoolConfig(cpus_per_rank=0)), "cpus_per_rank=0: must be above 0"),
        (placed(train=PoolConfig(gpus_per_rank=2)), "write 1, and raise placement.pools.train"),
        (placed(train=PoolConfig(gpus_per_rank=-1)), "gpus_per_rank=-1"),
        (placed(train=PoolConfig(ranks=2, gpus_per_rank=0.5)), "NCCL does not join"),
        (placed(train=PoolConfig(strategy="pack")), "strategy='pack': write PACK"),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(config: PlacementConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_pools(config, ["actor", "critic"])


def test_all_problems_are_told_at_once() -> None:
    config = placed({"critic": "x"}, train=PoolConfig(ranks=0, strategy="?"))
    assert len(list(placement_problems(config, ["actor", "critic"]))) == 3


def test_ranks_may_share_a_gpu_with_others_but_not_with_each_other() -> None:
    assert not list(
        placement_problems(placed(train=PoolConfig(ranks=2, gpus_per_rank=0.6)), ["actor"])
    )
    assert not list(
        placement_problems(placed(train=PoolConfig(ranks=1, gpus_per_rank=0.3)), ["actor"])
    )


def plan(**how: Any) -> list[PoolPlan]:
    return [PoolPlan(name="train", pool=PoolConfig(**how), roles=("actor",))]


def cluster(*sizes: tuple[float, float]) -> list[NodeResources]:
    return [
        NodeResources(name=str(i), cpus=cpus, gpus=gpus) for i, (cpus, gpus) in enumerate(sizes)
    ]


def test_a_plan_that_fits_has_no_problem() -> None:
    nodes = cluster((16, 8), (16, 8))
    assert not list(capacity_problems(plan(ranks=16, gpus_per_rank=1), nodes))


def test_more_gpus_than_the_cluster_has_are_refused() -> None:
    (found,) = capacity_problems(plan(ranks=4, gpus_per_rank=1), cluster((8, 2)))
    assert "needs 4 GPUs (train 4 x 1), the cluster has 2; lower" in found


def test_gpus_of_rollouts_count() -> None:
    nodes, pools = cluster((8, 4)), plan(ranks=4, gpus_per_rank=1)
    assert not list(capacity_problems(pools, nodes))
    (found,) = capacity_problems(pools, nodes, other_gpus=1)
    assert "rollouts 1" in found


def test_a_cluster_without_gpus_is_one_complaint_in_settings_that_there_are() -> None:
    (found,) = capacity_problems(plan(ranks=1, gpus_per_rank=1), cluster((8, 0)))
    assert "needs 1 GPU (" in found and "lower cluster.gpus," in found


def test_more_cores_than_the_cluster_has_are_refused() -> None:
    (found,) = capacity_problems(plan(ranks=3, cpus_per_rank=2), cluster((4, 0)))
    assert "needs 6 CPUs" in found


def test_a_rank_has_to_fit_on_one_node() -> None:
    (found,) = capacity_problems(plan(ranks=1, cpus_per_rank=6), cluster((4, 0), (4, 0)))
    assert "no node has 6 CPUs" in found


def test_strict_strategies_ask_for_nodes() -> None:
    nodes = cluster((4, 0), (4, 0))
    (packed,) = capacity_problems(plan(ranks=6, strategy="STRICT_PACK"), nodes)
    assert "for 6 of its ranks" in packed and "PACK" in packed
    (spread,) = capacity_problems(plan(ranks=3, strategy="STRICT_SPREAD"), nodes)
    assert "3 ranks need as many nodes, there are 2" in spread
