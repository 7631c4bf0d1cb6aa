"""The examples for clusters can be read, and what they run composes."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.config.load import load

FOLDER = Path(__file__).parents[3] / "examples" / "cluster"
# Fields of ray.io/v1, of KubeRay's ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go.
JOB_FIELDS = {
    "entrypoint", "runtimeEnvYAML", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished",
    "rayClusterSpec", "backoffLimit", "submissionMode", "activeDeadlineSeconds",
}  # fmt: skip
CLUSTER_FIELDS = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
GROUP_FIELDS = {
    "groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams",
    "template",
}  # fmt: skip


def composes(command: str) -> Any:
    """Check a command line of `agentrl train`; returns its configuration."""
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("agentrl", "train")
    env = words.pop(words.index("--env") + 1)
    words.remove("--env")
    return load([f"env.id={env}", *words])


@pytest.mark.parametrize("name", ["one_node.sh", "several_nodes.sh"])
def test_scripts_are_shell(name: str) -> None:
    subprocess.run(["bash", "-n", FOLDER / name], check=True, timeout=30)


@pytest.mark.parametrize(
    ("name", "arguments", "gpus"),
    [
        ("one_node.sh", ["0", "trainer.seed=3"], 0),
        ("one_node.sh", ["2", "trainer.seed=3"], 2),
        ("several_nodes.sh", ["train", "16", "trainer.seed=3"], 16),
    ],
)
def test_what_scripts_run_composes(
    tmp_path: Path, name: str, arguments: list[str], gpus: int
) -> None:
    said = tmp_path / "agentrl"
    said.write_text('#!/usr/bin/env bash\nprintf "%q " agentrl "$@"\n')
    said.chmod(0o755)
    done = subprocess.run(
        ["bash", FOLDER / name, *arguments],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SHARED": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    config = composes(done.stdout)
    assert (config.cluster.kind, config.cluster.gpus, config.trainer.seed) == ("ray", gpus, 3)


def test_the_job_has_the_fields_of_kuberay_and_enough_gpus() -> None:
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert spec.keys() <= JOB_FIELDS and spec["rayClusterSpec"].keys() <= CLUSTER_FIELDS
    groups = [spec["rayClusterSpec"]["headGroupSpec"], *spec["rayClusterSpec"]["workerGroupSpecs"]]
    assert all(group.keys() <= GROUP_FIELDS for group in groups)
    assert yaml.safe_load(spec["runtimeEnvYAML"]).keys() == {"env_vars"}
    gpus = 0
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        gpus += group.get("replicas", 1) * container["resources"]["limits"].get("nvidia.com/gpu", 0)
    folder, _, command = spec["entrypoint"].partition(" && ")
    assert folder == "cd /shared" and composes(command).cluster.gpus == gpus
