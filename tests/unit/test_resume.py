"""Where a checkpoint says that a run stands is believed only where it can be right."""

from __future__ import annotations

from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config.load import load, to_dict
from agentrl.errors import CheckpointError
from agentrl.resume import read_progress, restore
from agentrl.resuming import FILES, FREE_ON_RESUME, REORDER_ON_RESUME
from agentrl.rollout.buffer import Lookahead
from agentrl.train.checkpoint import CheckpointStore
from agentrl.train.progress import Progress

SAVED = asdict(Progress(step=3, cursor=12, learner={"kl": {"value": 0.1, "coef": 0.1}}))


def test_what_was_saved_comes_back() -> None:
    assert asdict(read_progress(SAVED, step=3)) == SAVED


@pytest.mark.parametrize("key", sorted(SAVED))
def test_a_missing_key_is_named(key: str) -> None:
    state = {name: value for name, value in SAVED.items() if name != key}
    with pytest.raises(CheckpointError, match=f"progress lacks {key}"):
        read_progress(state, step=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"curser": 1}, "progress has the unknown curser"),
        ({"cursor": -1}, r"progress.cursor=-1, which cannot be right"),
        ({"cursor": 1.5}, r"progress.cursor=1.5"),
        ({"cursor": True}, r"progress.cursor=True"),
        ({"empty_steps": "2"}, r"progress.empty_steps='2'"),
        ({"step": 4}, r"of step 3 holds progress.step=4"),
        ({"feed": None}, r"progress.feed=None"),
        ({"learner": {"lk": 1}}, r"progress.learner lacks kl, has the unknown lk"),
        ({"learner": {"kl": 0.1}}, r"progress.learner.kl=0.1"),
    ],
)
def test_what_cannot_be_right_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_progress(SAVED | change, step=3)


class _Part:
    """Stands in for every part of a run that is restored; notes what it was given."""

    metrics_path = Path("nowhere")

    def __init__(self) -> None:
        self.given: list[object] = []

    def load(self, directory: Path) -> None:
        self.given.append(directory)

    def load_state_dict(self, state: object, **_: object) -> None:
        self.given.append(state)

    def rewind(self, step: int) -> None:
        self.given.append(step)


def _resume(
    tmp_path: Path,
    changes: list[str],
    *,
    old_torch: bool = False,
    code: tuple[str, str] = ("1 /env.py", "1 /env.py"),
) -> list[object]:
    """Save a run at step 3, resume it with ``changes``; return what its engine was given.

    Args:
        code: stamps of the environment's file, then and now.
    """
    settings = ["env.id=any", "model=tiny"]
    saved = {**to_dict(load(settings)), FILES: {"env.id": code[0]}}
    store = CheckpointStore(tmp_path, config=saved)
    store.save(3, {}, SAVED, score=None)
    store.flush()
    checkpoint = store.load(3)
    (checkpoint.path / "actor").mkdir()
    if old_torch:
        checkpoint.versions["torch"] = "1.0"
    parts: dict[str, Any] = {name: _Part() for name in ("engine", "learner", "feed", "run_dir")}
    found: Any = SimpleNamespace(load_latest=lambda: checkpoint)
    config = load([*settings, f"trainer.resume={tmp_path}", *changes])
    progress, line = restore(
        config,
        found,
        {"actor": parts["engine"]},
        parts["learner"],
        parts["feed"],
        parts["run_dir"],
        Lookahead(prompts_per_step=2),
        {"env.id": code[1], "tool new": "3 /tool.yaml"},
    )
    assert progress.step == 3 and parts["run_dir"].given == [3] and line == []
    return parts["engine"].given


def test_every_role_gets_back_what_it_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert _resume(tmp_path, []) == [tmp_path / "step_000003" / "actor"]
    assert "changed since" not in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        "actor.tokens_per_micro_batch=1234",
        "actor.recompute=full",
        "actor.offload=all",
        "actor.compile=true",
        "trainer.num_threads=3",
    ],
)
def test_what_only_reorders_sums_may_change_and_is_told(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert _resume(tmp_path, [change])
    name = change.partition("=")[0]
    assert f"{name} changed since the checkpoint of step 3" in caplog.text
    assert "last digits may differ" in caplog.text


def test_other_libraries_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _resume(tmp_path, [], old_torch=True)
    assert "torch changed since the checkpoint" in caplog.text


@pytest.mark.parametrize(
    "change", ["actor.lr=0.5", "actor.precision=bf16", "lora.rank=4", "trainer.prompts_per_step=3"]
)
def test_what_trains_something_else_is_refused_unless_forced(tmp_path: Path, change: str) -> None:
    with pytest.raises(CheckpointError, match=change.partition("=")[0]):
        _resume(tmp_path, [change])
    assert _resume(tmp_path, [change, "trainer.force_resume=true"])


def test_other_code_is_refused_unless_forced_and_code_that_was_moved_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edited = ("1 /env.py", "2 /env.py")
    with pytest.raises(CheckpointError, match=r"file of env.id was '1 /env.py' and is now '2 /env"):
        _resume(tmp_path, [], code=edited)
    assert _resume(tmp_path, ["trainer.force_resume=true"], code=edited)
    assert "lies elsewhere" not in caplog.text
    assert _resume(tmp_path, [], code=("1 /env.py", "1 /new/env.py"))
    assert "lies elsewhere now, with the same content: env.id (/env.py is now /new/" in caplog.text


def test_settings_that_may_change_are_settings() -> None:
    config = load(["env.id=any", "model=tiny"])
    for name in (*FREE_ON_RESUME, *REORDER_ON_RESUME):
        # What stands in kwargs is up to the part that they are for.
        attrgetter(name.removesuffix(".").partition("kwargs.")[0].removesuffix("."))(config)
