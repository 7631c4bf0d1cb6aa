"""The wheel, as a user gets it: built, installed in a fresh environment, run elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), ROOT],
        check=True,
        capture_output=True,
        timeout=120,
    )
    return next(out.glob("*.whl"))


def test_top_level_names_are_ours_alone(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    packages = {name for name in names if not name.endswith(".dist-info")}
    assert packages == {"agentrl", "agentrl_envs", "agentrl_tools", "agentrl_sandboxes"}


def test_the_wheel_carries_its_data_files(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for wanted in (
        "agentrl/configs/train.yaml",
        "agentrl/configs/algo/grpo.yaml",
        "agentrl/py.typed",
        "agentrl_tools/python/tool.yaml",
        "agentrl_tools/calculator/tool.yaml",
        "agentrl_tools/search/sample.jsonl",
        "agentrl_tools/search_files/program.py",
    ):
        assert wanted in names


def test_an_installed_wheel_lists_environments_and_trains(wheel: Path, tmp_path: Path) -> None:
    """Dependencies come from this interpreter's site-packages; agentrl only from the wheel."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    site = next((venv / "lib").glob("python*/site-packages"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", site, wheel],
        check=True,
        timeout=120,
    )
    # After ours, so that the editable install of the checkout cannot shadow the wheel.
    (site / "dependencies.pth").write_text("\n".join(_dependency_paths()))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["AGENTRL_CACHE"] = str(tmp_path / "cache")
    python = str(venv / "bin" / "python")

    def agentrl(*arguments: str) -> str:
        done = subprocess.run(
            [python, "-m", "agentrl.cli.main", *arguments],
            cwd=elsewhere,
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    where = subprocess.run(
        [python, "-c", "import agentrl; print(agentrl.__file__)"],
        cwd=elsewhere,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(venv) in where.stdout
    listed = json.loads(agentrl("envs", "list", "--json"))
    assert {"code_sandbox", "guess_number", "calculator", "qa"} <= {item["id"] for item in listed}
    agentrl(
        "train",
        "--env",
        "guess_number",
        "model.warm_start.steps=3",
        "trainer.total_steps=1",
        "trainer.prompts_per_step=2",
        "rollout.n=2",
        "eval.val_tasks=4",
        "eval.test_tasks=4",
        "trainer.run_dir=run",
    )
    metrics = [json.loads(line) for line in (elsewhere / "run/metrics.jsonl").open()]
    assert [line["step"] for line in metrics] == [0, 1]


def _dependency_paths() -> list[str]:
    """Folders of this interpreter's packages, without the editable hook of the checkout."""
    import numpy

    return [str(Path(numpy.__file__).parents[1])]
