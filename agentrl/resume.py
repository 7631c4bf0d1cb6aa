"""Where a run is written, and how one goes on that was begun before."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any

from agentrl.config.load import to_dict
from agentrl.config.schema import Config
from agentrl.dist.engine import TrainEngine
from agentrl.env.entries import run_label
from agentrl.errors import CheckpointError
from agentrl.memory_plan import PLAN_FILE
from agentrl.resuming import REORDER_ON_RESUME, moved_files, refuse_another_training
from agentrl.rollout.buffer import Lookahead, Slot
from agentrl.rollout.feed import TaskFeed, check_keys
from agentrl.telemetry.jsonl import missing_steps
from agentrl.telemetry.run_dir import RunDir
from agentrl.train.checkpoint import Checkpoint, CheckpointStore
from agentrl.train.learner import Learner
from agentrl.train.progress import Progress
from agentrl.train.provenance import provenance
from agentrl.train.reference import discard_reference
from agentrl.train.rng_state import restore_rng
from agentrl.train.settings import changed_settings, is_among
from agentrl.train.waiting import read_waiting

logger = logging.getLogger(__name__)


@contextmanager
def claimed_run_dir(config: Config) -> Iterator[RunDir]:
    """Create the run directory, or open the one that is resumed; hold its lock meanwhile.

    A start that fails leaves nothing of its own behind, so that it can be tried again as it was.
    """
    if config.trainer.resume:
        run_dir = RunDir.resume(config.trainer.resume)
    elif config.trainer.run_dir:
        run_dir = RunDir.create(config.trainer.run_dir)
    else:
        run_dir = RunDir.create_named(run_label(config.env))
    try:
        yield run_dir
    finally:
        if not config.trainer.resume and not run_dir.config_path.is_file():  # it never began
            (run_dir.path / PLAN_FILE).unlink(missing_ok=True)
            discard_reference(run_dir.path)
        run_dir.close()
        run_dir.remove_if_empty()


def restore(
    config: Config,
    checkpoints: CheckpointStore,
    engines: Mapping[str, TrainEngine],
    learner: Learner,
    feed: TaskFeed,
    run_dir: RunDir,
    rules: Lookahead,
    files: Mapping[str, str],
) -> tuple[Progress, list[Slot]]:
    """Load the newest sound checkpoint into the parts of a run where it is resumed.

    Returns where the run stands, and the groups that were sampled ahead, in line.

    A run that was killed before its first checkpoint starts again at step 0.

    Args:
        engines: by role: those that the checkpoint holds.
        rules: of the line that groups stand in.
        files: stamps of the run's code.

    Raises:
        CheckpointError: every checkpoint is damaged, or settings that change the training, its
            code, or the training tasks, differ.
    """
    checkpoint = checkpoints.load_latest() if config.trainer.resume else None
    if checkpoint is None:
        run_dir.rewind(-1)
        return Progress(), []
    if not config.trainer.force_resume:
        refuse_another_training(checkpoint.config, config, files)
    _tell_what_changes_bits(checkpoint, config)
    if moved := moved_files(checkpoint.config, files):
        logger.warning(
            "code that lies elsewhere now, with the same content: %s. What it reads beside itself "
            "may be another",
            "; ".join(moved),
        )
    progress = read_progress(checkpoint.progress, step=checkpoint.step)
    if missing := missing_steps(run_dir.metrics_path, through=checkpoint.step):
        logger.warning(
            "%s has no lines of %d of the steps 0 to %d (%s): deleted or emptied? The run goes on, "
            "but its curves and report will lack them",
            run_dir.metrics_path,
            len(missing),
            checkpoint.step,
            ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else ""),
        )
    feed.load_state_dict(progress.feed, check_tasks=not config.trainer.force_resume)
    line = read_waiting(checkpoint.path, feed, rules, step=checkpoint.step)
    for role, engine in engines.items():
        engine.load(checkpoint.of_engine(role))
    if progress.learner:
        learner.load_state_dict(progress.learner)
    restore_rng(checkpoint.rng)
    run_dir.rewind(checkpoint.step)
    return progress, line


def _tell_what_changes_bits(checkpoint: Checkpoint, config: Config) -> None:
    """Log what may make the last digits differ from those of a run that was never stopped."""
    settings = changed_settings(checkpoint.config, to_dict(config))
    names = _whole_pools(name for name in settings if is_among(name, REORDER_ON_RESUME))
    now = provenance()
    names += [name for name, was in checkpoint.versions.items() if now.get(name) != was]
    if names:
        logger.warning(
            "%s changed since the checkpoint of step %d: the run goes on with the same training, "
            "but sums may be formed in another order, so its last digits may differ from those of "
            "a run that was never stopped",
            ", ".join(names),
            checkpoint.step,
        )


def _whole_pools(names: Iterable[str]) -> list[str]:
    """Name a pool once, however many of its settings differ: mostly the pool is new or gone."""
    found = (re.sub(r"^(placement\.pools\.[^.]+)\..*", r"\1", name) for name in names)
    return list(dict.fromkeys(found))


def read_progress(state: Mapping[str, Any], *, step: int) -> Progress:
    """Return where a checkpoint says that the run stands.

    Args:
        step: of the checkpoint.

    Raises:
        CheckpointError: a key is missing or unknown, or its value cannot be right; names it.
    """
    check_keys(state, [field.name for field in fields(Progress)], where="progress")
    for field in fields(Progress):
        value = state[field.name]
        if field.default is MISSING:
            sound = isinstance(value, Mapping)
        else:
            sound = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not sound or (field.name == "step" and value != step):
            raise _not_right(step, field.name, value)
    if state["learner"]:
        check_keys(state["learner"], ("kl",), where="progress.learner")
        if not isinstance(state["learner"]["kl"], Mapping):
            raise _not_right(step, "learner.kl", state["learner"]["kl"])
    return Progress(**state)


def _not_right(step: int, name: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {step} holds progress.{name}={value!r}, which cannot be right: it "
        "is damaged; resume from another one, or start a new run"
    )
