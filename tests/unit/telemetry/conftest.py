from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.telemetry.run_dir import RunDir
from agentrl.testing.synthetic_run import write_synthetic_run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A small run that reached its last step. Shared: do not change it."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    return write_synthetic_run(folder, num_steps=8, num_eval_tasks=20, prompts_per_step=4)


@pytest.fixture
def own_run(tmp_path: Path) -> RunDir:
    """A run of three of five steps that a test may damage."""
    return write_synthetic_run(
        tmp_path / "own", num_steps=3, total_steps=5, num_eval_tasks=6, prompts_per_step=3
    )
