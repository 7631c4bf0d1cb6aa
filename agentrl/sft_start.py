"""What supervised training is told, and refused for before anything heavy loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl.cli.options import check_out_dir
from agentrl.config.keys import unknown_key_message
from agentrl.errors import ConfigError
from agentrl.train.sft_config import FOLDER, LAST_FILE, SFTConfig


@dataclass(slots=True, frozen=True, kw_only=True)
class SFTSources:
    """Where conversations come from."""

    env_id: str | None = None
    """An environment, for its demonstrations."""
    data: str | None = None
    """A file, pattern, directory or ``hf:NAME`` of conversations."""
    val: str | None = None
    """The same for those held out; None: every tenth of ``data``, at most 256."""


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
    if (sources.env_id is None) == (sources.data is None):
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
