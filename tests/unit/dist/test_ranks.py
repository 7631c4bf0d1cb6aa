from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentrl.dist.config import EngineConfig
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.errors import ConfigError
from agentrl.testing.random_models import build


def test_a_process_by_itself_is_all_there_is() -> None:
    ranks = Ranks.single("cpu")
    assert (ranks.dp_rank, ranks.dp_size, ranks.sequence_rank) == (0, 1, 0)
    assert ranks.largest(7) == 7 and ranks.device == torch.device("cpu")


def test_neighbours_share_rows() -> None:
    places = [
        Ranks(device=torch.device("cpu"), rank=rank, world_size=6, sequence_parallel=2)
        for rank in range(6)
    ]
    assert [place.dp_rank for place in places] == [0, 0, 1, 1, 2, 2]
    assert [place.sequence_rank for place in places] == [0, 1, 0, 1, 0, 1]
    assert {place.dp_size for place in places} == {3}


def test_settings_that_do_not_fit_are_refused_before_a_model_is_touched() -> None:
    with pytest.raises(ConfigError, match=r"critic\.sequence_parallel=2.*write 1"):
        Ranks.single("cpu").arranged(shard_size=0, sequence_parallel=2, role="critic")
    with pytest.raises(ConfigError, match=r"actor\.shard_size=3"):
        config = EngineConfig(shard_size=3)
        FSDPEngine(build(), None, config, ranks=Ranks.single("cpu"))


_WAITS = """
import sys
from agentrl.dist.ranks import join_ranks
from agentrl.errors import WorkerTimeout

try:
    join_ranks(sys.argv[1], rank=0, world_size=2, device="cpu", timeout_s=1.0)
except WorkerTimeout as error:
    print(error)
"""


@pytest.mark.timeout(60)
def test_a_rank_that_nobody_joins_says_so_in_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WAITS, (tmp_path / "meet").as_uri()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    assert "rank 0 of 2 waited" in found.stdout and "Look whether all ranks" in found.stdout
