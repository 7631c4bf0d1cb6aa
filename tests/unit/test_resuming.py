from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agentrl.config.code_files import named_files, stamped
from agentrl.config.load import load, to_dict
from agentrl.errors import AgentRLError, CheckpointError, ConfigError
from agentrl.resume import _whole_pools
from agentrl.resuming import FILES, edited_since, resumed_config
from agentrl.train.checkpoint import CheckpointStore

BASE = ["env.id=guess_number", "trainer.total_steps=4"]


def run_at(path: Path, step: int, *settings: str) -> str:
    """Write what a run leaves of its settings and its newest checkpoint."""
    config = load([*BASE, *settings])
    path.mkdir()
    (path / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    saved = {**to_dict(config), FILES: stamped(named_files(config))}
    store = CheckpointStore(path / "checkpoints", config=saved)
    store.save(step, {}, {"step": step}, score=None)
    store.flush()
    return str(path)


def test_a_run_goes_on_with_its_settings_and_those_that_may_change(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", 2)
    config = resumed_config(run, ["trainer.save_every=3"])
    assert config.trainer.resume == run and config.trainer.save_every == 3
    assert config.env.id == "guess_number"


def test_how_samples_are_served_and_when_a_run_gives_up_may_change(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", 2, "rollout=vllm")
    changes = [
        "rollout.serving.max_restarts=20",
        "rollout.serving.metrics_port=9000",
        "rollout.engine.kwargs.log_path=vllm.log",
        "rollout.gpu_memory_fraction=0.3",
        "rollout.replicas_per_gpu=2",
        "rollout.concurrency=64",
        "weight_sync.bucket_mb=64",
        "failure.max_mismatch_kl=2",
        "failure.warn_mismatch=1.1",
    ]
    config = resumed_config(run, changes)
    assert config.rollout.serving.max_restarts == 20 and config.failure.max_mismatch_kl == 2.0
    for samples_otherwise in ("rollout.engine.kwargs.dtype=bfloat16", "failure.k=5"):
        with pytest.raises(CheckpointError, match="made with other settings"):
            resumed_config(run, [*changes, samples_otherwise])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["actor.lr=0.5"], r"actor.lr was 0.0005 and is now 0.5"),
        (["trainer.total_steps=9"], r"is now 9 \(actor.schedule=linear makes the learning rate"),
        (["trainer.resume=other"], "which run is meant"),
        (["actor.recompute=some"], "actor.recompute"),
    ],
)
def test_what_files_alone_can_tell_is_refused_before_torch_loads(
    tmp_path: Path, changes: list[str], said: str
) -> None:
    run = run_at(tmp_path / "run", 2)
    with pytest.raises(AgentRLError, match=said):
        resumed_config(run, changes)
    code = (
        "import sys\n"
        "from agentrl.errors import AgentRLError\n"
        "from agentrl.resuming import FILES, resumed_config\n"
        "for run, changes in ((sys.argv[1], sys.argv[2:]), ('nowhere', [])):\n"
        "    try:\n"
        "        resumed_config(run, changes)\n"
        "    except AgentRLError:\n"
        "        print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, run, *changes],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["False", "False"]


def test_a_longer_run_of_a_constant_rate_is_the_same_run(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", 4, "actor.schedule=constant")
    assert resumed_config(run, ["trainer.total_steps=9"]).trainer.total_steps == 9
    with pytest.raises(ConfigError, match=r"stands at step 4 of 4; raise trainer.total_steps to"):
        resumed_config(run, [])


def test_a_finished_run_says_what_its_schedule_asks_for(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", 4)
    with pytest.raises(ConfigError, match=r"trainer.force_resume=true, since actor.schedule=linea"):
        resumed_config(run, [])
    longer = ["trainer.total_steps=9", "trainer.force_resume=true"]
    assert resumed_config(run, longer).trainer.total_steps == 9


def test_a_resume_that_was_forced_forces_no_other(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", 2)
    forced = resumed_config(run, ["actor.lr=0.5", "trainer.force_resume=true"])
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(to_dict(forced)))
    with pytest.raises(CheckpointError, match=r"actor.lr was 0.0005 and is now 0.5"):
        resumed_config(run, [])
    store = CheckpointStore(tmp_path / "run" / "checkpoints", config=to_dict(forced))
    store.save(3, {}, {"step": 3}, score=None)
    store.flush()
    assert resumed_config(run, []).actor.lr == 0.5
    with pytest.raises(CheckpointError, match=r"actor.lr was 0.5 and is now 0.1"):
        resumed_config(run, ["actor.lr=0.1"])


def test_a_run_whose_last_checkpoint_is_damaged_has_not_finished(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", 4)
    (tmp_path / "run" / "checkpoints" / "step_000004" / "tensors.safetensors").write_bytes(b"x")
    assert resumed_config(run, []).trainer.resume == run


def test_no_run_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run directory: it has no config.yaml"):
        resumed_config(str(tmp_path), [])


def test_a_pool_that_is_new_is_named_once() -> None:
    fields = ["ranks", "gpus_per_rank", "strategy"]
    names = [f"placement.pools.train.{name}" for name in fields]
    assert _whole_pools(["cluster.kind", *names]) == ["cluster.kind", "placement.pools.train"]


def test_settings_of_another_training_need_force(tmp_path: Path) -> None:
    run = run_at(tmp_path / "run", 2)
    with pytest.raises(CheckpointError, match="trainer.force_resume=true"):
        resumed_config(run, ["actor.lr=0.5"])
    assert resumed_config(run, ["actor.lr=0.5", "trainer.force_resume=true"]).actor.lr == 0.5


def test_code_of_another_folder_or_that_was_edited_needs_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "env.py").write_text("mine")
        (folder / "tool.yaml").write_text("mine")
    monkeypatch.chdir(here)
    run = run_at(tmp_path / "run", 2, "env.id='./env.py:E'", "tools.specs.python=./tool.yaml")
    assert resumed_config(run, []).env.id == "./env.py:E"
    monkeypatch.chdir(there)
    assert resumed_config(run, [])  # the same code
    (there / "env.py").write_text("another")
    was, now = f"'[0-9a-f]{{16}} {here}/env.py'", f"'[0-9a-f]{{16}} {there}/env.py'"
    with pytest.raises(CheckpointError, match=f"the file of env.id was {was} and is now {now}. Us"):
        resumed_config(run, [])
    monkeypatch.chdir(here)
    (here / "tool.yaml").write_text("edited")
    with pytest.raises(CheckpointError, match=r"the file of tools.specs.python was .*force_resume"):
        resumed_config(run, [])
    with pytest.raises(CheckpointError, match=r"actor.lr was .*; the file of tools.specs.python"):
        resumed_config(run, ["actor.lr=0.5"])
    assert resumed_config(run, ["trainer.force_resume=true"]).env.id == "./env.py:E"


@pytest.mark.parametrize("files", [None, [], {"env.id": 3}, {"gone": "0 /gone.py"}])
def test_a_checkpoint_without_stamps_of_the_code_goes_on(tmp_path: Path, files: object) -> None:
    env = tmp_path / "env.py"
    env.write_text("mine")
    run = run_at(tmp_path / "run", 2, f"env.id='{env}:E'")
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    store = CheckpointStore(tmp_path / "run" / "checkpoints", config={**config, FILES: files})
    store.save(3, {}, {"step": 3}, score=None)
    store.flush()
    env.write_text("edited")
    assert resumed_config(run, [])


def test_code_that_was_edited_since_is_named_where_settings_name_it_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("home", "away"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text(f"# {folder}")
    (tmp_path / "home" / "other.py").write_text("# another")
    monkeypatch.chdir(tmp_path / "home")
    run = Path(run_at(tmp_path / "run", 2, "env.id=./env.py:Env"))

    def edited(*settings: str) -> list[str]:
        config = load([*BASE, "env.id=./env.py:Env", *settings])
        return edited_since(run, config, stamped(named_files(config)))

    assert edited() == []
    assert edited("env.id=./other.py:Env") == []
    monkeypatch.chdir(tmp_path / "away")
    (told,) = edited()
    assert told.startswith("env.id was ")
    assert f"{tmp_path}/home/env.py" in told and f"{tmp_path}/away/env.py" in told
    (tmp_path / "away" / "env.py").write_text("# home")
    assert edited() == []
