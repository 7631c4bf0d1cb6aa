"""What several files of runs share; also lets them import the helper modules beside them."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # under any import mode of pytest

from marked_processes import MARK, wait_until_gone

from agentrl.dist.ray_cluster import ray_cluster


@pytest.fixture(scope="module")
def one_thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One warm start for all runs of a file, computed as the processes of Ray compute."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def cluster(one_thread: None) -> Iterator[str]:
    """Ray for all runs in this process; returns the mark of everything that runs in it."""
    mark = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        with ray_cluster(num_cpus=8, object_store_bytes=200 << 20):
            yield mark
        assert not wait_until_gone(mark, 30)
