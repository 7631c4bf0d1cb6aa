"""Engines by name: one that is none is refused in words."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import ConfigError, RegistryError
from agentrl.rollout.config import PartConfig, RolloutConfig
from agentrl.rollout.engines import build_engine
from agentrl.rollout.engines.build import EngineSetup


def setup(name: str) -> EngineSetup:
    rollout = RolloutConfig(engine=PartConfig(id=name))
    return EngineSetup(model=None, rollout=rollout, deterministic=True)


def refuses(_: EngineSetup) -> Any:
    raise ConfigError("set it otherwise")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("json:dumps", "json:dumps.*failed with TypeError"),
        ("builtins:id", "built int, which is no rollout engine: it lacks start, generate"),
        ("no_such_package:Engine", "importing 'no_such_package' failed"),
        ("nothing", "unknown rollout engine 'nothing'"),
    ],
)
def test_what_is_no_engine_is_refused_in_words(name: str, message: str) -> None:
    with pytest.raises(RegistryError, match=message):
        build_engine(name, setup(name))


def test_what_an_engine_refuses_stays_as_it_said_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.engines.engine_registry._entries", {"mine": refuses})
    with pytest.raises(ConfigError, match="set it otherwise"):
        build_engine("mine", setup("mine"))
