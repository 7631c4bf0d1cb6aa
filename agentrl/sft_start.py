"""What supervised training is told, and refused for before anything heavy loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl.cli.options import check_out_dir, with_env
from agentrl.config.keys import unknown_key_message
from agentrl.config.load import given_keys, load
from agentrl.env.config import EnvConfig
from agentrl.errors import ConfigError
from agentrl.sandbox.config import SandboxConfig
from agentrl.tool.config import ToolsConfig
from agentrl.train.sft_config import FOLDER, LAST_FILE, SFTConfig

_PLAYING = ("env", "sandbox", "tools")
"""Sections that say how demonstrations are played, named as for `agentrl train`."""


@dataclass(slots=True, frozen=True, kw_only=True)
class DemonstrationSource:
    """Environments, and what their demonstrations are played with."""

    env: EnvConfig
    sandbox: SandboxConfig
    tools: ToolsConfig


@dataclass(slots=True, frozen=True, kw_only=True)
class SFTSources:
    """Where conversations come from."""

    demonstrations: DemonstrationSource | None = None
    """Of environments."""
    data: str | None = None
    """A file, pattern, directory or ``hf:NAME`` of conversations."""
    val: str | None = None
    """The same for those held out; None: every tenth of ``data``, at most 256."""


def part_settings(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the settings of supervised training, and those of ``env``, ``sandbox``, ``tools``."""
    training: list[str] = []
    playing: list[str] = []
    for item in overrides:
        section = item.split("=", 1)[0].lstrip("+").partition(".")[0]
        (playing if section in _PLAYING else training).append(item)
    return training, playing


def sft_sources(
    *,
    env_id: str | None = None,
    data: str | None = None,
    val: str | None = None,
    playing: Sequence[str] = (),
) -> SFTSources:
    """Read where conversations come from.

    Args:
        env_id, data, val: what ``--env``, ``--data`` and ``--val`` name.
        playing: ``key=value`` settings of ``env``, ``sandbox`` and ``tools``.

    Raises:
        ConfigError: settings that cannot work, or that nothing would read.
    """
    if data is not None and env_id is None and playing:
        raise ConfigError(
            f"{' '.join(playing)} with --data: {', '.join(_PLAYING)} say how the demonstrations of "
            "an environment are played; leave them out, or give --env in place of --data"
        )
    if env_id is None and not playing:
        return SFTSources(data=data, val=val)
    if "env.id" in given_keys(playing):
        raise ConfigError("env.id: here the environment is named by --env; write --env ID")
    config = load(with_env(tuple(playing), env_id))
    if problems := list(_unread(config.env, given_keys(playing))):
        raise ConfigError("\n".join(problems))
    source = DemonstrationSource(env=config.env, sandbox=config.sandbox, tools=config.tools)
    return SFTSources(demonstrations=source, data=data, val=val)


def _unread(env: EnvConfig, given: frozenset[str]) -> Iterator[str]:
    if "env.tasks_timeout_s" in given:
        yield "env.tasks_timeout_s: demonstrations bring their tasks; leave it out"
    for index, entry in enumerate(env.mix):
        if entry.algo:
            yield (
                f"env.mix[{index}].algo={entry.algo}: supervised training has no advantages; leave "
                "it out"
            )


def sft_settings(overrides: Sequence[str]) -> SFTConfig:
    """Read ``key=value`` settings of supervised training.

    Raises:
        ConfigError: an unknown key, a wrong type, or values that cannot work.
    """
    defaults = OmegaConf.structured(SFTConfig)
    known = [str(name) for name in defaults]
    for item in overrides:
        key = item.split("=", 1)[0].lstrip("+")
        if "=" not in item or key.partition(".")[0] not in known:
            raise ConfigError(unknown_key_message(key, known))
    try:
        merged = OmegaConf.merge(defaults, OmegaConf.from_dotlist(list(overrides)))
        settings = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        where = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{where}{str(error).splitlines()[0]}") from error
    assert isinstance(settings, SFTConfig)
    if problems := list(settings.problems()):
        raise ConfigError("\n".join(problems))
    return settings


def refuse_start(sources: SFTSources, *, out: Path, resume: bool) -> None:
    """Refuse sources that leave open what is meant, and an ``out`` that cannot be written.

    Raises:
        ConfigError: says what to give.
    """
    if (sources.demonstrations is None) == (sources.data is None):
        raise ConfigError("give either --env (its demonstrations) or --data (conversations)")
    if sources.val is not None and sources.data is None:
        raise ConfigError("--val goes with --data: an environment brings its own validation split")
    is_begun, is_finished = (out / FOLDER).is_dir(), (out / LAST_FILE).is_file()
    if resume and is_finished:
        raise ConfigError(f"{str(out)!r} holds a finished model: there is nothing to resume")
    if resume and not is_begun:
        raise ConfigError(f"{str(out)!r} holds no {FOLDER}/: there is nothing to resume")
    if resume:
        return
    if is_begun and not is_finished:
        raise ConfigError(
            f"{str(out)!r} is not empty: it holds a training that has not ended; go on with it by "
            "adding --resume, or give another directory"
        )
    check_out_dir(out)
