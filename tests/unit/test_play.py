"""Playing without training: what a policy is played with, and when it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

from agentrl.config.code_files import named_files, stamped
from agentrl.config.load import load, to_dict
from agentrl.errors import EngineError
from agentrl.play import finished, play_split, playing_config
from agentrl.resuming import FILES
from agentrl.testing.virtual_time import run_virtual
from agentrl.train.checkpoint import CheckpointStore


def test_a_run_brings_its_template_with_its_tokenizer(tmp_path: Path) -> None:
    settings = ["env.id=guess_number", "model.path=some/model", "model.chat_template=gone.jinja"]
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(to_dict(load(settings))))
    run = str(tmp_path)
    assert playing_config(None, run, []).model.chat_template is None
    given = playing_config(None, run, ["model.chat_template=other.jinja"])
    assert given.model.chat_template == "other.jinja"


def test_episodes_may_take_as_long_as_they_go_on_and_end_where_they_stand_still() -> None:
    async def all_of(seconds: list[float]) -> list[float]:
        pending = [asyncio.ensure_future(asyncio.sleep(item, item)) for item in seconds]
        return await finished(pending, what="playing test", stall_s=60.0, quiet=True)

    assert run_virtual(all_of([150.0, 50.0, 100.0])) == [150.0, 50.0, 100.0]
    with pytest.raises(EngineError, match="playing test stands still: of 3 tasks 2 have ended"):
        run_virtual(all_of([50.0, 1e6, 100.0]))


def test_where_an_episode_fails_the_others_close_what_is_theirs_first() -> None:
    closed: list[str] = []

    async def long() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(1.0)  # of sandboxes, say
            closed.append("long")

    async def fail(error: Exception) -> None:
        await asyncio.sleep(1.0)
        raise error

    async def play(error: Exception) -> None:
        pending = [asyncio.ensure_future(long()), asyncio.ensure_future(fail(error))]
        await finished(pending, what="playing test", stall_s=60.0, quiet=True)

    with pytest.raises(EngineError, match="the engine is gone"):
        run_virtual(play(EngineError("the engine is gone")))
    assert closed == ["long"]
    with pytest.raises(TimeoutError, match="of its own"):  # and not: stands still
        run_virtual(play(TimeoutError("of its own")))


ENV = 'from agentrl.testing import EchoEnv\n\n\nclass Mine(EchoEnv):\n    """{}"""\n'


def test_a_run_that_is_played_with_other_code_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The environment's file of another folder, under the name that the run has for its own."""
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    for folder in ("home", "away"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "env.py").write_text(ENV.format(folder))
    monkeypatch.chdir(tmp_path / "home")
    config = load(["env.id=./env.py:Mine"])
    (run / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    saved = {**to_dict(config), FILES: stamped(named_files(config))}
    store = CheckpointStore(run / "checkpoints", config=saved)
    store.save(1, {}, {"step": 1}, score=None)
    store.flush()

    def stop(*arguments: object, **options: object) -> NoReturn:
        raise EngineError("far enough")

    monkeypatch.setattr("agentrl.play.open_playground", stop)

    def told() -> str:
        caplog.clear()
        with pytest.raises(EngineError, match="far enough"):
            config = playing_config(None, str(run), [])
            asyncio.run(play_split(config, split="train", num_samples=1, num_tasks=1))
        return caplog.text

    assert told() == ""
    monkeypatch.chdir(tmp_path / "away")
    found = told()
    assert f"this is not what the run {run} was trained with: env.id was " in found
    assert f"{tmp_path}/home/env.py" in found and f"{tmp_path}/away/env.py" in found
