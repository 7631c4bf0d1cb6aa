"""What a run asks of a cluster, before anything of it starts."""

from __future__ import annotations

import pytest

from agentrl.cluster import cpus_needed, refuse_too_small, worker_config
from agentrl.config.load import load
from agentrl.dist.placement import NodeResources
from agentrl.errors import ConfigError

RAY = ["env.id=guess_number", "cluster=ray"]


def node(cpus: float, gpus: float) -> NodeResources:
    return NodeResources(name="n", cpus=cpus, gpus=gpus)


@pytest.mark.parametrize(
    ("overrides", "nodes", "message"),
    [
        (["rollout.workers=3"], [node(3, 0)], "needs 4 CPUs.*3 rollout.workers.*has 3"),
        (["cluster.gpus=2"], [node(8, 1)], "GPU.*has 1"),
        (
            ["cluster.gpus=1", "cluster.gpus_per_rollout_worker=1"],
            [node(8, 1)],
            "rollouts 1.*has 1",
        ),
        (["placement.pools.train.cpus_per_rank=4"], [node(3, 0), node(3, 0)], "no node has 4 CPUs"),
    ],
)
def test_a_cluster_that_is_too_small_is_refused_with_the_numbers(
    overrides: list[str], nodes: list[NodeResources], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_too_small(load([*RAY, *overrides]), nodes)


@pytest.mark.parametrize(
    ("overrides", "nodes"),
    [
        (["rollout.workers=2"], [node(3, 0)]),
        (["cluster.gpus=2", "rollout.workers=2"], [node(4, 1), node(4, 1)]),
        (["cluster.gpus=1", "cluster.gpus_per_rollout_worker=1"], [node(2, 2)]),
    ],
)
def test_one_that_suffices_is_not(overrides: list[str], nodes: list[NodeResources]) -> None:
    refuse_too_small(load([*RAY, *overrides]), nodes)


def test_cpus_count_ranks_of_all_pools_and_workers() -> None:
    assert cpus_needed(load(RAY)) == 2
    more = [
        "placement.pools.train.ranks=2",
        "rollout.workers=3",
        "cluster.cpus_per_rollout_worker=.5",
    ]
    assert cpus_needed(load([*RAY, *more])) == 4


def test_workers_of_one_machine_offer_their_metrics_at_ports_of_their_own() -> None:
    ports = ["rollout.workers=3", "rollout.serving.metrics_port=9000"]
    for overrides, expected in ((ports, [9000, 9001, 9002]), (["rollout.workers=3"], [0, 0, 0])):
        config = load([*RAY, *overrides])
        found = [worker_config(config, i).rollout.serving.metrics_port for i in range(3)]
        assert found == expected
    with pytest.raises(ConfigError, match=r"metrics_port=65534 with rollout.workers=3.*65533"):
        load([*RAY, "rollout.workers=3", "rollout.serving.metrics_port=65534"])
