from __future__ import annotations

import pytest

from agentrl.cluster import cpus_needed
from agentrl.config.load import load


@pytest.mark.parametrize(
    ("settings", "cores"),
    [
        ([], 2),
        (["rollout.workers=3"], 4),
        (["placement.pools.train.ranks=2"], 3),
        (["placement.pools.train.ranks=2", "placement.pools.train.cpus_per_rank=1.5"], 4),
        # The pool that trains is there without being named.
        (
            [
                "placement.pools.judge.ranks=2",
                "placement.roles.reward_model=judge",
                "reward.parts=[{id: hf_classifier, kwargs: {model: some/model}}]",
            ],
            4,
        ),
    ],
)
def test_a_cluster_of_ones_own_has_room_for_every_process(settings: list[str], cores: int) -> None:
    config = load(["env.id=guess_number", "cluster=ray", *settings])
    assert cpus_needed(config) == cores
