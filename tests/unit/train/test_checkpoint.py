from __future__ import annotations

import hashlib
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.dist.engine import PendingSave
from agentrl.dist.sharded_state import load_full, load_sharded, save_sharded
from agentrl.errors import CheckpointError, WorkerLost
from agentrl.train.checkpoint import CheckpointStore, load_checkpoint
from agentrl.train.manifest import write_manifest
from agentrl.train.rng_state import restore_rng

from . import trains_for_ever

CONFIG = {"actor": {"lr": 1e-3}}
NUM_KILLS = 50 if os.environ.get("AGENTRL_SOAK") == "1" else 5


class Engine:
    """Holds one tensor; saves it as the real ones do."""

    def __init__(self, step: int = 0, size: int = 1000) -> None:
        self.weight = torch.full((size,), float(step))
        self.num_updates = 2 * step

    def save(self, directory: Path) -> PendingSave:
        tensors = {"model/weight": self.weight}
        return save_sharded(directory, tensors, {"num_updates": self.num_updates}, rank=0)

    def load(self, directory: Path) -> None:
        values = load_sharded(directory, {"model/weight": self.weight}, rank=0)
        self.num_updates = values["num_updates"]


def _begin(store: CheckpointStore, step: int, size: int = 1000, score: float | None = None) -> Path:
    engines: Any = {"actor": Engine(step, size)}
    store.save(step, engines, {"step": step, "in_flight": [f"task-{step}"]}, score=score)
    return store.directory / f"step_{step:06d}"


def _save(store: CheckpointStore, step: int, size: int = 1000, score: float | None = None) -> Path:
    path = _begin(store, step, size, score)
    store.flush()
    return path


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
    engine = Engine()
    engine.load(found.of_engine("actor"))
    assert torch.equal(engine.weight, torch.full((1000,), 12.0))
    assert engine.num_updates == 24
    with pytest.raises(CheckpointError, match="no state of the role 'critic'"):
        found.of_engine("critic")
    assert found.versions["torch"] and found.damaged == []
    restore_rng(found.rng)
    assert (random.random(), np.random.rand()) == drawn


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = _store(tmp_path, keep_last=2)
    for step in (5, 10, 999_999, 1_000_000):
        _save(store, step)
    assert store.steps() == [999_999, 1_000_000]
    assert sorted(os.listdir(tmp_path)) == ["step_1000000", "step_999999"]


FILES = [
    "manifest.json",
    "state.json",
    "tensors.safetensors",
    "actor/shard_00000.safetensors",
    "actor/values_00000.json",
]


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
    tmp_path: Path, file: str, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = _store(tmp_path)
    _save(store, 10)
    newest = _save(store, 20)
    damage(newest / file)
    with pytest.raises(CheckpointError, match="step_000020") as refused:
        store.load(20)
    assert file in str(refused.value)
    found = store.load_latest()
    assert found is not None and found.step == 10
    assert len(found.damaged) == 1 and "step_000020" in found.damaged[0]
    (said,) = [r.getMessage() for r in caplog.records if "step_000020" in r.getMessage()]
    assert said.endswith("going back to the checkpoint of step 10")


@pytest.mark.parametrize("added", ["actor/shard_00001.safetensors", "critic/values.json", "x"])
def test_a_file_that_was_added_is_refused_by_name(tmp_path: Path, added: str) -> None:
    """A shard of another checkpoint would be read as one more rank's."""
    store = _store(tmp_path)
    _save(store, 10)
    newest = _save(store, 20)
    (newest / added).parent.mkdir(exist_ok=True)
    shutil.copy(newest / "actor/shard_00000.safetensors", newest / added)
    with pytest.raises(CheckpointError, match=f"{added} is not of it"):
        store.load(20)
    found = store.load_latest()
    assert found is not None and found.step == 10


def test_the_best_one_is_kept_however_old_also_by_a_resumed_run(tmp_path: Path) -> None:
    scores = {1: 0.2, 2: 0.5, 3: None, 4: 0.5, 5: 0.1, 6: None}
    for step, score in scores.items():
        _save(_store(tmp_path), step, score=score)  # a store of its own: nothing is in memory
    assert _store(tmp_path).steps() == [2, 5, 6]
    assert _store(tmp_path).best_step() == 2
    assert _store(tmp_path).load(2).score == 0.5
    _save(_store(tmp_path), 7, score=0.6)
    assert _store(tmp_path).steps() == [6, 7]
    store = CheckpointStore(tmp_path, config=CONFIG, keep_last=1, keep_best=False)
    _save(store, 8, score=0.0)
    assert store.steps() == [8]


def test_a_run_that_went_back_keeps_what_it_makes_from_there(tmp_path: Path) -> None:
    store = _store(tmp_path)
    for step in (10, 20, 30):
        _save(store, step, score=step / 100)
    _truncate(tmp_path / "step_000030" / "state.json")
    _save(store, 21, score=0.0)  # resumed from step 20
    _save(store, 22)
    # Step 30 will be overwritten; until then it neither counts as one of the last nor as the best.
    assert store.steps() == [20, 21, 22, 30]


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


def test_only_damaged_checkpoints_are_an_error_not_a_fresh_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = _store(tmp_path)
    for step in (1, 2):
        _empty(_save(store, step) / "state.json")
    with pytest.raises(CheckpointError, match=r"step_000002.*step_000001.*new run"):
        store.load_latest()
    assert not caplog.records  # what the error says is not said twice


def test_a_missing_checkpoint_and_another_format_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint .*step_000003"):
        load_checkpoint(tmp_path / "step_000003")
    path = _save(_store(tmp_path), 4)
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 1'))
    with pytest.raises(CheckpointError, match=r"format 1, .*reads 2: .*agentrl export RUN OUT"):
        load_checkpoint(path)


def _signed(path: Path, **changes: Any) -> None:
    """Write a manifest that says of itself that it is whole."""
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    del manifest["blake2b"]
    digest = hashlib.blake2b(json.dumps(manifest).encode(), digest_size=32).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest | {"blake2b": digest}))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": math.inf},
        {"step": 4.0},
        {"step": -1},
        {"score": math.nan},
        {"score": 10**400},
        {"files": []},
        {"files": {"state.json": {"blake2b": "x"}}},
        {"files": {"../../state.json": {"bytes": 2, "blake2b": "x"}}},
    ],
    ids=str,
)
def test_a_manifest_of_another_form_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = _save(_store(tmp_path), 4)
    _signed(path, **changes)
    with pytest.raises(CheckpointError, match="step_000004' is damaged"):
        load_checkpoint(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "null", "[]", "9" * 10_000, "NaN"])
def test_json_that_is_no_manifest_or_no_state_is_refused(tmp_path: Path, text: str) -> None:
    path = _save(_store(tmp_path), 4)
    (path / "state.json").write_text(text)
    write_manifest(path, step=4, score=None)
    with pytest.raises(CheckpointError, match="step_000004' cannot be read"):
        load_checkpoint(path)
    (path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="is damaged: manifest.json"):
        load_checkpoint(path)


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_manifest_is_not_waited_for(tmp_path: Path) -> None:
    path = _save(_store(tmp_path), 4)
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    with pytest.raises(CheckpointError, match="no plain file"):
        load_checkpoint(path)


@pytest.mark.parametrize("part", ["progress", "rng", "config", "versions"])
def test_a_state_whose_parts_are_no_mappings_is_refused(tmp_path: Path, part: str) -> None:
    path = _save(_store(tmp_path), 4)
    state = json.loads((path / "state.json").read_text()) | {part: [1]}
    (path / "state.json").write_text(json.dumps(state))
    write_manifest(path, step=4, score=None)
    with pytest.raises(CheckpointError, match=f"{part} is list, not a mapping"):
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
        engines: Any = {"actor": Engine(2)}
        store.save(2, engines, {"feed": {"a": {1}}}, score=None)
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


class _Slow:
    """An engine whose files wait for a word."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.num_saves = 0

    def save(self, directory: Path) -> PendingSave:
        self.num_saves += 1
        return self

    def wait(self) -> None:
        assert self.go_on.wait(timeout=30)


def test_a_checkpoint_is_not_there_before_every_file_is_and_a_second_save_waits(
    tmp_path: Path,
) -> None:
    store, slow = _store(tmp_path), _Slow()
    engines: Any = {"actor": Engine(1), "critic": slow}
    progress = {"cursor": 1}
    store.save(1, engines, progress, score=None)
    engines["actor"].weight.fill_(99.0)  # the run goes on meanwhile
    progress["cursor"] = 99
    assert store.steps() == []
    second = threading.Thread(target=_save, args=(store, 2))
    second.start()
    second.join(timeout=0.2)
    assert second.is_alive() and store.steps() == []
    slow.go_on.set()
    second.join(timeout=30)
    assert store.steps() == [1, 2]
    found = store.load(1)
    engines["actor"].load(found.of_engine("actor"))
    assert float(engines["actor"].weight[0]) == 1.0 and found.progress == {"cursor": 1}


class _Failing:
    """An engine whose files cannot be written, which shows later."""

    def save(self, directory: Path) -> PendingSave:
        return self

    def wait(self) -> None:
        raise CheckpointError("rank 3 found no space")


@pytest.mark.parametrize("surfaces_at", ["save", "flush", "close"])
def test_what_failed_in_the_background_is_told_once(
    tmp_path: Path, surfaces_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = _store(tmp_path)
    _save(store, 1)
    engines: Any = {"actor": Engine(2), "critic": _Failing()}
    store.save(2, engines, {}, score=None)
    if surfaces_at == "close":
        store.close()
        assert "rank 3 found no space" in caplog.text
    else:
        with pytest.raises(CheckpointError, match=r"rank 3 found no space.*step_000001"):
            _begin(store, 3) if surfaces_at == "save" else store.flush()
    store.flush()
    assert os.listdir(tmp_path) == ["step_000001"]
    _save(store, 4)
    assert store.steps() == [1, 4]


def test_an_engine_that_cannot_begin_to_save_leaves_nothing(tmp_path: Path) -> None:
    class Broken:
        def save(self, directory: Path) -> PendingSave:
            raise WorkerLost("rank 1 is gone")

    store = _store(tmp_path)
    engines: Any = {"actor": Engine(1), "critic": Broken()}
    with pytest.raises(WorkerLost, match="rank 1 is gone"):
        store.save(1, engines, {}, score=None)
    store.flush()
    assert os.listdir(tmp_path) == []


# A program of its own: a fork of this process, which has threads, may inherit a held lock.
PROGRAM = Path(__file__).with_name("trains_for_ever.py")


def _kill_while_saving(directory: Path, newest: int, delay_s: float) -> None:
    """Let the run go on from ``newest``; kill it a moment after its first checkpoint."""
    child = subprocess.Popen([sys.executable, str(PROGRAM), str(directory)])
    deadline = time.monotonic() + 100
    try:
        while not (directory / f"step_{newest + 1:06d}").exists():
            assert child.poll() is None, "the child died before it saved"
            assert time.monotonic() < deadline, "the child never saved"
            time.sleep(0.0005)
        time.sleep(delay_s)
    finally:
        child.kill()
        child.wait(timeout=30)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute as the program does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_run_killed_at_any_moment_of_a_save_goes_on_as_if_it_never_was(
    tmp_path: Path, one_thread: None
) -> None:
    rng = random.Random(0)
    store, unbroken = _store(tmp_path), trains_for_ever.Engine()
    newest = num_interrupted = 0
    for _ in range(NUM_KILLS):
        _kill_while_saving(tmp_path, newest, delay_s=rng.uniform(0.0, 0.03))
        num_interrupted += any(name.startswith(".") for name in os.listdir(tmp_path))
        assert store.steps()[-1] > newest
        newest = store.steps()[-1]
        for step in store.steps():
            assert store.load(step).progress["step"] == step  # complete: every checksum holds
        while unbroken.num_updates < newest:
            unbroken.train()
        unbroken.save(_new(tmp_path / "unbroken")).wait()
        saved = load_full(store.load(newest).of_engine("actor"))
        for name, value in load_full(tmp_path / "unbroken").items():
            assert torch.equal(value, saved[name]), (newest, name)
        shutil.rmtree(tmp_path / "unbroken")
    assert num_interrupted > 0, "no kill came in the middle of a save: the test showed nothing"


def _new(directory: Path) -> Path:
    directory.mkdir()
    return directory
