"""Which run goes on, and under which settings it may: read from its files, before anything heavy.

Loads no torch: a run that cannot be resumed as asked is refused at once. What checkpoints hold is
compared again, checksums included, when they are loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config.code_files import has_same_content, named_files, stamped, texts
from agentrl.config.load import composed, from_yaml, to_dict
from agentrl.config.schema import Config
from agentrl.config.validate import validate
from agentrl.dist.config import Schedule
from agentrl.errors import CheckpointError, ConfigError
from agentrl.train.settings import is_among, refuse_changed_settings

CONFIG_FILE = "config.yaml"
FILES = "files"
"""Beside the settings that a checkpoint holds: stamps of the code that they name."""
# Settings that a resumed run may change: they decide where, how long and when to give up, not what
# is trained.
FREE_ON_RESUME = (
    "trainer.save_every",
    "trainer.keep_last",
    "trainer.keep_best",
    "trainer.grace_s",
    "trainer.run_dir",
    "trainer.resume",
    "trainer.force_resume",
    "trainer.trajectories",
    "telemetry.",
    "sandbox.max_open",
    "sandbox.create_timeout_s",
    "tools.breaker.",
    "rollout.collect_timeout_s",
    "rollout.serving.",
    "rollout.gpu_memory_fraction",
    "rollout.sleep_level",
    *(
        f"rollout.engine.kwargs.{name}"
        for name in (
            "api_key_env",
            "base_url",
            "call_timeout_s",
            "command",
            "cpu_cache_mb",
            "devices",
            "drain_timeout_s",
            "health_timeout_s",
            "log_path",
            "port",
            "request_timeout_s",
            "session_cache_mb",
            "start_timeout_s",
        )
    ),
    "rollout.workers",
    "failure.max_empty_steps",
    "failure.max_mismatch_kl",
    "failure.max_skipped_updates",
    "failure.max_start_mismatch",
    "failure.warn_mismatch",
    "cluster.",
    "placement.",
    "weight_sync.",
)
# Settings that leave what is computed as it is, but add its numbers up in another order.
REORDER_ON_RESUME = (
    "placement.",
    "cluster.",
    "rollout.workers",
    "rollout.concurrency",
    "rollout.replicas_per_gpu",
    "rollout.tensor_parallel",
    "trainer.num_threads",
    "model.device",
    *(
        f"{role}.{name}"
        for role in ("actor", "critic")
        for name in (
            "tokens_per_micro_batch",
            "recompute",
            "offload",
            "compile",
            "shard_size",
            "sequence_parallel",
        )
    ),
)
_LENGTH = ("trainer.total_steps", "trainer.epochs")
_CHECKPOINT = re.compile(r"step_(\d{6,})")


def resumed_config(run: str, overrides: Sequence[str]) -> Config:
    """Return the configuration of a run directory, with ``overrides`` on top, to resume it.

    Raises:
        ConfigError: it is no run directory or has finished, or another one is to be written or
            resumed.
        CheckpointError: the run was trained with other settings.
    """
    path = Path(run) / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"{run!r} is no run directory: it has no {CONFIG_FILE}")
    base = from_yaml(path)
    base.trainer.resume = run
    base.trainer.run_dir = None  # where the run began; it may have been moved since
    base.trainer.force_resume = False  # said of one resume, and not of all that follow
    config = composed(overrides, base=base)
    if config.trainer.resume != run:
        raise ConfigError(
            f"trainer.resume={config.trainer.resume!r} with --resume {run}: which run is meant? "
            "Leave one of them out"
        )
    step, saved = _newest_checkpoint(Path(run))
    if saved and not config.trainer.force_resume:
        refuse_another_training(saved, config)
    total = config.trainer.total_steps
    if config.trainer.epochs is None and step >= total and _is_sound(Path(run), step):
        refuse_finished(config, run, step=step, total_steps=total)
    validate(config)
    return config


def refuse_finished(config: Config, run: str, *, step: int, total_steps: int) -> None:
    """Refuse to go on with a run that stands at its last step.

    Raises:
        ConfigError: it does; says what would make it longer.
    """
    if step < total_steps or not step:
        return
    setting = "total_steps" if config.trainer.epochs is None else "epochs"
    scheduled = ", ".join(_scheduled(config))
    force = f" and set trainer.force_resume=true, since {scheduled} depends on the length"
    raise ConfigError(
        f"the run {run!r} has finished: it stands at step {step} of {total_steps}; raise "
        f"trainer.{setting} to go on{force if scheduled else ''}"
    )


def refuse_another_training(
    saved: Mapping[str, Any], config: Config, files: Mapping[str, str] | None = None
) -> None:
    """Refuse settings that would train something else than those a checkpoint was made with.

    So would other code under the same name: a file of another folder, or one that was edited.

    Args:
        files: stamps of all code of the run; None: of what settings name, which files alone tell.

    Raises:
        CheckpointError: names each with both values, and why the length of a run is one of them.
    """
    before, now = _stamps(saved), stamped(named_files(config)) if files is None else files
    edited = [name for name in _edited(before, now) if not is_among(name, FREE_ON_RESUME)]
    settings = {name: value for name, value in saved.items() if name != FILES}
    code = [{f"the file of {name}": stamps[name] for name in edited} for stamps in (before, now)]
    # A longer run is the same run only where the learning rate does not depend on its length.
    scheduled = " and ".join(_scheduled(config))
    free = (*FREE_ON_RESUME, *REORDER_ON_RESUME, *(() if scheduled else _LENGTH))
    why = f"{scheduled} makes the learning rate of every step depend on the length of the run"
    refuse_changed_settings(
        settings | code[0],
        to_dict(config) | code[1],
        free=free,
        why=dict.fromkeys(_LENGTH, why),
    )


def edited_since(run: Path, config: Config, files: Mapping[str, str]) -> list[str]:
    """Say which code has another content than when the newest checkpoint of a run was made.

    Where a setting names another file than it did then, that is what was asked for.

    Args:
        files: stamps of the code now.
    """
    _, saved = _newest_checkpoint(run)
    before, named_then, named_now = _stamps(saved), dict(texts(saved)), dict(texts(to_dict(config)))
    return [
        f"{name} was {before[name]!r} and is now {files[name]!r}"
        for name in _edited(before, files)
        if named_then.get(name) == named_now.get(name)
    ]


def moved_files(saved: Mapping[str, Any], files: Mapping[str, str]) -> list[str]:
    """Say which code lies elsewhere than when a checkpoint was made, its content unchanged."""
    return [
        f"{name} ({before.partition(' ')[2]} is now {files[name].partition(' ')[2]})"
        for name, before in _stamps(saved).items()
        if name in files and before != files[name] and has_same_content(before, files[name])
    ]


def _edited(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names under which two kinds of stamps have another content."""
    shared = sorted(before.keys() & now.keys())
    return [name for name in shared if not has_same_content(before[name], now[name])]


def _stamps(saved: Mapping[str, Any]) -> dict[str, str]:
    """Return the stamps that a checkpoint holds; none of one that was made without."""
    found = saved.get(FILES)
    if not isinstance(found, Mapping):
        return {}
    return {name: stamp for name, stamp in found.items() if isinstance(stamp, str)}


def _scheduled(config: Config) -> Iterator[str]:
    """Yield the schedules of learning rates that depend on the length of the run."""
    for role, engine in (("actor", config.actor), ("critic", config.critic)):
        if engine.schedule is not Schedule.constant:
            yield f"{role}.schedule={engine.schedule}"


def _newest_checkpoint(run: Path) -> tuple[int, Mapping[str, Any]]:
    """Return step and settings of the newest checkpoint, as far as they can be read.

    0 and nothing where there is none. A damaged one is found when it is loaded.
    """
    folder = run / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    steps = [int(match[1]) for match in map(_CHECKPOINT.fullmatch, names) if match]
    if not steps:
        return 0, {}
    step = max(steps)
    try:
        text = (_checkpoint(run, step) / "state.json").read_text(encoding="utf-8")
        config = json.loads(text)["config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0, {}
    return (step, config) if isinstance(config, dict) else (0, {})


def _is_sound(run: Path, step: int) -> bool:
    """Whether a run may be said to stand at this checkpoint, and does not go back before it."""
    from agentrl.train.manifest import verify  # loads torch: only where it decides

    try:
        verify(_checkpoint(run, step))
    except CheckpointError:
        return False
    return True


def _checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:06d}"
