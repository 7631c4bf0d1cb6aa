from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algo.loss import SupervisedLoss
from agentrl.dist.config import EngineConfig, Schedule
from agentrl.dist.engines.fsdp import FSDPEngine
from agentrl.dist.ranks import Ranks
from agentrl.errors import CheckpointError
from agentrl.model.tiny import build_tiny, tiny_config
from agentrl.testing import make_tokenizer
from agentrl.train.checkpoint import CheckpointStore, load_checkpoint
from agentrl.train.rng_state import restore_rng
from agentrl.train.sft_data import EncodedExample, to_batch

CONFIG = {"actor": {"lr": 1e-3}}
NUM_KILLS = 50 if os.environ.get("AGENTRL_SOAK") == "1" else 5


def _engine(step: int, size: int = 1000) -> dict[str, Any]:
    return {"model": {"weight": torch.full((size,), float(step))}, "num_updates": 2 * step}


def _save(store: CheckpointStore, step: int, size: int = 1000) -> Path:
    store.save(step, _engine(step, size), {"step": step, "in_flight": [f"task-{step}"]})
    return store.directory / f"step_{step:06d}"


def _store(directory: Path, keep_last: int = 2) -> CheckpointStore:
    return CheckpointStore(directory, config=CONFIG, keep_last=keep_last)


def test_everything_comes_back_from_the_newest(tmp_path: Path) -> None:
    store = _store(tmp_path / "checkpoints")
    assert store.load_latest() is None
    _save(store, 1)
    random.seed(1)
    np.random.seed(1)
    path = _save(store, 12)
    drawn = random.random(), np.random.rand()
    found = store.load_latest()
    assert found is not None
    assert (found.step, found.path, found.config) == (12, path, CONFIG)
    assert found.progress == {"step": 12, "in_flight": ["task-12"]}
    assert torch.equal(found.engine["model"]["weight"], torch.full((1000,), 12.0))
    assert found.engine["num_updates"] == 24
    assert found.versions["torch"] and found.damaged == []
    restore_rng(found.rng)
    assert (random.random(), np.random.rand()) == drawn


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = _store(tmp_path, keep_last=2)
    for step in (5, 10, 999_999, 1_000_000):
        _save(store, step)
    assert store.steps() == [999_999, 1_000_000]
    assert sorted(os.listdir(tmp_path)) == ["step_1000000", "step_999999"]


FILES = ["manifest.json", "state.json", "tensors.safetensors"]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [_truncate, _empty, _flip, Path.unlink])
def test_a_damaged_file_is_refused_by_name_and_the_previous_checkpoint_used(
    tmp_path: Path, file: str, damage: Any
) -> None:
    store = _store(tmp_path)
    _save(store, 10)
    newest = _save(store, 20)
    damage(newest / file)
    with pytest.raises(CheckpointError, match="step_000020") as refused:
        store.load(20)
    assert file in str(refused.value) or file == "manifest.json"
    found = store.load_latest()
    assert found is not None and found.step == 10
    assert len(found.damaged) == 1 and "step_000020" in found.damaged[0]


def test_a_run_can_save_over_a_damaged_checkpoint_of_the_same_step(tmp_path: Path) -> None:
    store = _store(tmp_path)
    _truncate(_save(store, 20) / "state.json")
    _save(store, 20)
    assert store.load(20).progress["step"] == 20


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    store = _store(tmp_path)
    _save(store, 20).rename(tmp_path / "step_000030")
    with pytest.raises(CheckpointError, match="of step 20"):
        store.load(30)


def test_only_damaged_checkpoints_are_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    store = _store(tmp_path)
    for step in (1, 2):
        _empty(_save(store, step) / "state.json")
    with pytest.raises(CheckpointError, match=r"step_000002.*step_000001.*new run"):
        store.load_latest()


def test_a_missing_checkpoint_and_another_format_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint .*step_000003"):
        load_checkpoint(tmp_path / "step_000003")
    path = _save(_store(tmp_path), 4)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(CheckpointError, match="format 9"):
        load_checkpoint(path)


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Let no file grow beyond 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_half_written(
    tmp_path: Path, full_disk: None
) -> None:
    store = _store(tmp_path, keep_last=1)
    _save(store, 10)
    with pytest.raises(CheckpointError, match=r"step_000020.*intact \(step_000010\)"):
        _save(store, 20, size=100_000)
    assert os.listdir(tmp_path) == ["step_000010"]
    found = store.load_latest()
    assert found is not None and found.step == 10


def test_a_state_that_cannot_be_stored_is_named_by_its_place(tmp_path: Path) -> None:
    store = _store(tmp_path)
    _save(store, 1)
    with pytest.raises(CheckpointError, match=r"/progress/feed/a is a set.*intact \(step_000001\)"):
        store.save(2, _engine(2), {"feed": {"a": {1}}})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert load_checkpoint(tmp_path / "step_000001").step == 1


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    blocker = tmp_path / "checkpoints"
    blocker.write_text("a file")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        _save(_store(blocker), 1)


def test_leftovers_of_a_killed_run_are_cleared_and_never_loaded(tmp_path: Path) -> None:
    store = _store(tmp_path)
    _save(store, 1)
    for name in (".writing-step_000002-abc", ".deleting-step_000000-abc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{")
    assert store.steps() == [1]
    _save(store, 2)
    assert sorted(os.listdir(tmp_path)) == ["step_000001", "step_000002"]


def test_training_that_went_through_the_disk_is_the_same_bits(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    shape = tiny_config(len(tokenizer), hidden_size=32, num_layers=1, num_heads=1, head_dim=16)
    config = EngineConfig(lr=1e-2, schedule=Schedule.linear, warmup_steps=2)

    def engine(seed: int) -> FSDPEngine:
        return FSDPEngine(
            build_tiny(tokenizer, seed, shape),
            None,
            config,
            total_updates=6,
            ranks=Ranks.single("cpu"),
        )

    def train(engine: FSDPEngine, steps: range) -> None:
        for step in steps:
            ids = [1, *((7 * step + i) % 200 for i in range(20))]
            batch = to_batch([EncodedExample(ids=ids, loss_mask=[i > 3 for i in range(21)])])
            engine.train_mini_batch(batch, SupervisedLoss(), tokens_per_micro_batch=64)

    unbroken = engine(0)
    train(unbroken, range(3))
    _store(tmp_path).save(3, unbroken.state_dict(), {"step": 3})
    train(unbroken, range(3, 6))
    resumed = engine(1)
    found = _store(tmp_path).load_latest()
    assert found is not None
    resumed.load_state_dict(found.engine)
    train(resumed, range(found.progress["step"], 6))
    left, right = resumed.state_dict(), unbroken.state_dict()
    assert left["num_updates"] == right["num_updates"] == 6
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        for name, value in left["optimizer"][kind].items():
            assert torch.equal(value, right["optimizer"][kind][name]), (kind, name)
    for name, value in left["model"].items():
        assert torch.equal(value, right["model"][name]), name


# A program of its own: a fork of this process, which has threads, may inherit a held lock.
_SAVES_FOR_EVER = """
import sys
from itertools import count
from pathlib import Path
import torch
from agentrl.train.checkpoint import CheckpointStore

store = CheckpointStore(Path(sys.argv[1]), config={}, keep_last=2)
for step in count(int(sys.argv[2])):
    engine = {"model": {"weight": torch.full((300_000,), float(step))}, "num_updates": step}
    store.save(step, engine, {"step": step})
"""


def _kill_while_saving(directory: Path, first: int, delay_s: float) -> None:
    """Start a process that saves without end; kill it a moment after its first checkpoint."""
    arguments = [sys.executable, "-c", _SAVES_FOR_EVER, str(directory), str(first)]
    child = subprocess.Popen(arguments)
    deadline = time.monotonic() + 100
    try:
        while not (directory / f"step_{first:06d}").exists():
            assert child.poll() is None, "the child died before it saved"
            assert time.monotonic() < deadline, "the child never saved"
            time.sleep(0.0005)
        time.sleep(delay_s)
    finally:
        child.kill()
        child.wait(timeout=30)


def test_kill_9_at_any_moment_of_a_save_leaves_complete_checkpoints_only(tmp_path: Path) -> None:
    rng = random.Random(0)
    store = _store(tmp_path)
    _save(store, 0)
    num_interrupted = 0
    for _ in range(NUM_KILLS):
        newest = store.steps()[-1]
        _kill_while_saving(tmp_path, newest + 1, delay_s=rng.uniform(0.0, 0.03))
        num_interrupted += any(name.startswith(".") for name in os.listdir(tmp_path))
        assert store.steps()[-1] >= newest
        for step in store.steps():
            found = store.load(step)  # complete: every checksum holds
            assert found.progress["step"] == step
            weight = found.engine["model"]["weight"]
            assert bool((weight == step).all())
    assert num_interrupted > 0, "no kill came in the middle of a save: the test showed nothing"
