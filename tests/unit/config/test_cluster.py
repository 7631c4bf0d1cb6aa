"""What a run takes of a cluster, and what of its settings is refused."""

from __future__ import annotations

import re

import pytest

from agentrl.config.cluster import gpu_shortage, placement_of, rollout_share
from agentrl.config.load import load
from agentrl.errors import ConfigError

ENV = "env.id=guess_number"
RAY = [ENV, "cluster=ray"]
CUDA_IPC = "weight_sync.transport=cuda_ipc"


def test_cluster_ray_is_a_choice() -> None:
    config = load([*RAY, "rollout.workers=3"])
    assert (config.cluster.kind, config.rollout.workers) == ("ray", 3)
    assert load([ENV]).cluster.kind == "local"


@pytest.mark.parametrize(
    "settings",
    [
        ["weight_sync.transport=shm"],
        ["weight_sync.transport=gloo", "cluster.gpus=1"],
        [CUDA_IPC, "cluster.gpus=1"],
        ["weight_sync.transport=nccl", "cluster.gpus=1", "cluster.gpus_per_rollout_worker=1"],
        ["weight_sync.transport=shm", "cluster.gpus=1", "cluster.gpus_per_rollout_worker=0"],
    ],
)
def test_a_transport_that_fits_is_accepted(settings: list[str]) -> None:
    load([*RAY, *settings])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([ENV, "rollout.workers=2"], "rollout.workers=2.*add cluster=ray"),
        ([ENV, "cluster.gpus=1"], "cluster.gpus=1.*add cluster=ray"),
        ([ENV, "cluster.address=auto"], "cluster.address='auto'.*add cluster=ray"),
        ([*RAY, "rollout.workers=0"], "rollout.workers=0: must be between 1"),
        ([*RAY, "cluster.gpus=-1"], "cluster.gpus=-1: must be at least 0"),
        ([*RAY, "cluster.max_restarts=-1"], "cluster.max_restarts=-1"),
        ([*RAY, "cluster.start_timeout_s=0"], "cluster.start_timeout_s=0"),
        ([*RAY, "weight_sync.bucket_mb=0"], "weight_sync.bucket_mb=0"),
        ([ENV, "weight_sync.bucket_mb=0"], "weight_sync.bucket_mb=0: must be between 1 and"),
        ([ENV, "weight_sync.bucket_mb=99999999"], "weight_sync.bucket_mb=99999999: must be"),
        ([ENV, "weight_sync.timeout_s=nan"], "weight_sync.timeout_s=nan"),
        ([ENV, "weight_sync.transport=gloo"], "transport=gloo.*add cluster=ray, or leave it at"),
        ([ENV, "weight_sync.transport=my.ways:NEW"], "transport=my.ways:NEW.*add cluster=ray"),
        ([*RAY, "weight_sync.transport=nccl"], "transport=nccl: needs GPUs for .*leave it at auto"),
        ([*RAY, "weight_sync.transport=cuda_ipc"], "transport=cuda_ipc: needs GPUs for training"),
        (
            [*RAY, "cluster.gpus=1", "cluster.gpus_per_rollout_worker=0", CUDA_IPC],
            "transport=cuda_ipc: needs GPUs for training ranks .* and for rollout workers",
        ),
        ([*RAY, "cluster.gpus=1", "weight_sync.transport=nccl"], "nccl: rollout workers share"),
        (
            [*RAY, "cluster.gpus=1", "weight_sync.transport=shm"],
            "shm: is between CPUs, and rollout",
        ),
        ([*RAY, "weight_sync.transport=ncl"], "'ncl' is unknown; did you mean nccl"),
        ([*RAY, "weight_sync.timeout_s=inf"], "weight_sync.timeout_s=inf"),
        ([*RAY, "cluster.gpus_per_rollout_worker=1.5"], "a whole number"),
        ([*RAY, "cluster.gpus=2", "rollout.max_staleness=1"], "share the GPUs.*max_staleness=0"),
        ([*RAY, "model.device=cuda:1"], "leave it at auto"),
        ([*RAY, "cluster.kind=slurm"], "cluster.kind='slurm' is unknown"),
        ([*RAY, "cluster.worker=2"], "unknown setting 'cluster.worker'"),
        (
            [*RAY, "placement.pools.train.rank=2"],
            "'placement.pools.train.rank'; did you mean placement.pools.train.ranks",
        ),
        ([*RAY, "placement.pools.train.ranks=two"], "placement.pools.train.ranks.*'two'"),
        ([*RAY, "placement.pools.train=2"], "write placement.pools.train.ranks="),
        ([ENV, "placement.pools.train.ranks=2"], "ranks=2: one process is all"),
        ([ENV, "placement.pools.train.gpus_per_rank=1"], "gpus_per_rank=1.0: one process is all"),
        ([ENV, "placement.pools.train.cpus_per_rank=nan"], "cpus_per_rank=nan: one process"),
        ([ENV, "cluster.runtime_env.working_dir=x"], "cluster.runtime_env=.*one process is all"),
        ([ENV, "cluster.gpus_per_rollout_worker=1"], "gpus_per_rollout_worker=1.0: one process"),
        (
            [*RAY, "placement.pools.train.ranks=0"],
            r"^placement.pools.train.ranks=0: [^\n]*$",
        ),
        (
            [*RAY, "placement.pools.train.ranks=100000000000", "actor.sequence_parallel=7"],
            "placement.pools.train.ranks=100000000000: must be .* at most 65536",
        ),
        ([*RAY, "placement.pools.train.gpus_per_rank=nan"], "train.gpus_per_rank=nan: a rank uses"),
        ([*RAY, "placement.pools.train.gpus_per_rank=1e-9"], "train.gpus_per_rank=1e-09"),
        ([*RAY, "placement.pools.train.cpus_per_rank=nan"], "cpus_per_rank=nan: must be above 0"),
        ([*RAY, "placement.pools.train.cpus_per_rank=1e-9"], "cpus_per_rank=1e-09: must be above"),
        ([*RAY, "cluster.cpus_per_rollout_worker=1e300"], r"=1e\+300: must be between 0.0001 and"),
        ([*RAY, "cluster.gpus_per_rollout_worker=inf"], "gpus_per_rollout_worker=inf: write 0"),
        ([*RAY, "cluster.gpus_per_rollout_worker=nan"], "gpus_per_rollout_worker=nan: write 0"),
        ([*RAY, "cluster.gpus=-1"], r"^cluster.gpus=-1: [^\n]*$"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(overrides)


def test_a_pool_is_made_by_naming_it() -> None:
    config = load([*RAY, "placement.pools.train.ranks=2", "placement.roles.actor=train"])
    again = load(["placement.pools.train.strategy=SPREAD"], base=config)
    pool = again.placement.pools["train"]
    assert (pool.ranks, pool.strategy, again.placement.roles) == (2, "SPREAD", {"actor": "train"})


@pytest.mark.parametrize(
    ("gpus", "workers", "rank", "worker"),
    [(2, 2, 0.6, 0.4), (1, 1, 0.6, 0.4), (2, 1, 0.6, 0.4), (2, 3, 0.6, 0.2), (1, 3, 0.6, 0.133)],
)
def test_rollout_workers_share_the_gpus_of_ranks_that_never_share_one(
    gpus: int, workers: int, rank: float, worker: float
) -> None:
    config = load([*RAY, f"cluster.gpus={gpus}", f"rollout.workers={workers}"])
    pool, share = placement_of(config).pools["train"], rollout_share(config)
    assert (pool.ranks, pool.gpus_per_rank) == (gpus, rank)
    assert share.shared and share.gpus == pytest.approx(worker)
    assert 2 * rank > 1 and gpus * 0.4 + 1e-9 >= workers * share.gpus


@pytest.mark.parametrize(
    ("overrides", "rank", "worker"),
    [
        (["cluster.gpus=2", "cluster.gpus_per_rollout_worker=1"], 1.0, 1.0),
        (["cluster.gpus=2", "cluster.gpus_per_rollout_worker=0"], 1.0, 0.0),
        (["placement.pools.train={ranks: 2, gpus_per_rank: 1}"], 1.0, 1.0),
        (["placement.pools.train={ranks: 2}"], 0.0, 0.0),
        ([], None, 0.0),
    ],
)
def test_without_sharing_each_has_gpus_of_its_own_or_none(
    overrides: list[str], rank: float | None, worker: float
) -> None:
    config = load([*RAY, *overrides])
    share = rollout_share(config)
    assert not share.shared and share.gpus == worker
    pool = placement_of(config).pools.get("train")
    assert rank == (None if pool is None else pool.gpus_per_rank)


@pytest.mark.parametrize(
    "address",
    ["", "head", "10.0.0.1", ":6379", "head:", "head:0", "head:99999", "http://head:8265", "a:b"],
)
def test_an_address_of_another_form_is_refused_before_anything_starts(address: str) -> None:
    with pytest.raises(ConfigError, match="cluster.address=.*write host:port"):
        load([*RAY, f"cluster.address='{address}'"])


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:1", "[::1]:6379"])
def test_an_address_of_the_right_form_is_tried(address: str) -> None:
    assert load([*RAY, f"cluster.address='{address}'"]).cluster.address == address


@pytest.mark.parametrize(
    ("settings", "here", "said"),
    [
        (["cluster.gpus=2"], 0, r"^cluster.gpus=2 takes 2 GPUs, and this machine has none: give "),
        (["cluster.gpus=2"], 0, r"cluster=ray placement.pools.train.ranks=2$"),
        (["cluster.gpus=2"], 1, "has 1: "),
        (
            ["placement.pools.train.ranks=1", "placement.pools.train.gpus_per_rank=1"],
            0,
            r"^placement.pools.train.gpus_per_rank=1 .*takes 2 GPUs",
        ),
        (
            ["cluster.gpus=2", "cluster.gpus_per_rollout_worker=1", "rollout.workers=2"],
            3,
            r"^cluster.gpus=2 with cluster.gpus_per_rollout_worker=1 takes 4 GPUs",
        ),
    ],
)
def test_gpus_that_this_machine_lacks_are_told_in_the_settings_that_ask_for_them(
    settings: list[str], here: int, said: str
) -> None:
    config = load(["env.id=any", "cluster=ray", *settings])
    problem = gpu_shortage(config, here=here)
    assert problem is not None and re.search(said, problem) and "\n" not in problem


@pytest.mark.parametrize(
    ("settings", "here"),
    [
        (["cluster=ray"], 0),
        (["cluster=ray", "cluster.gpus=2"], 2),
        (["cluster=ray", "cluster.gpus=2", "cluster.address=head:6379"], 0),
        (["cluster=ray", "placement.pools.train={ranks: 2, gpus_per_rank: 0.6}"], 2),
        (["cluster=local"], 0),
    ],
)
def test_a_run_that_has_its_gpus_is_not_refused(settings: list[str], here: int) -> None:
    assert gpu_shortage(load(["env.id=any", *settings]), here=here) is None
