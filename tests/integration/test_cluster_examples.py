"""The examples for clusters: files that the tools they are for can read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_valid_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)


def test_the_job_for_kubernetes_asks_for_the_gpus_it_reserves() -> None:
    spec = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())["spec"]
    group = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    container = group["template"]["spec"]["containers"][0]
    reserved = group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert f"cluster.gpus={reserved}" in spec["entrypoint"]
