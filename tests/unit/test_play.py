"""Playing without training: what a policy is played with, and when it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from agentrl.config.load import load, to_dict
from agentrl.errors import EngineError
from agentrl.play import finished, playing_config
from agentrl.testing.virtual_time import run_virtual


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
