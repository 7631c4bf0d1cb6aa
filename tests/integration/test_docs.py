"""Pages and examples that could fall behind the code."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.env.check import check_env
from agentrl.env.config import EnvConfig

ROOT = Path(__file__).parents[2]


def test_the_page_of_settings_is_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "configuration_page.py", "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_minimal_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "minimal_grpo.py"]
        + ["--steps", "2", "--prompts", "2", "--samples", "4", "--warm-steps", "20"],
        env=os.environ | {"AGENTRL_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step ") == 2 and "after:" in done.stdout


@pytest.mark.parametrize(
    ("page", "name"), [("README.md", "Echo"), ("docs/environments.md", "HigherLower")]
)
def test_the_environments_of_the_pages_keep_the_contract(
    page: str, name: str, tmp_path: Path
) -> None:
    blocks = (ROOT / page).read_text().split("```python\n")[1:]
    (code,) = (block.split("```")[0] for block in blocks if f"class {name}(" in block)
    file = tmp_path / "mine.py"
    file.write_text(code)
    assert asyncio.run(check_env(EnvConfig(id=f"{file}:{name}"))) == []
