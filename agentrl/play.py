"""Playing episodes without training: what `agentrl eval` and `agentrl rollout` do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from agentrl.config.code_files import named_files, stamped
from agentrl.config.load import from_yaml, load
from agentrl.config.overrides import itemised, parse
from agentrl.config.schema import Config
from agentrl.env.task_check import SPLITS
from agentrl.errors import ConfigError, EngineError
from agentrl.limits import within_positions
from agentrl.plan import evaluation_plan
from agentrl.playground import open_playground
from agentrl.resuming import edited_since
from agentrl.rollout.tasks import check_tasks
from agentrl.telemetry.console import say
from agentrl.train.environments import (
    Environment,
    code_files,
    make_environments,
    refuse_idle_specs,
)
from agentrl.train.evaluate import choose_tasks, dispatches, refuse_censored, stands_still
from agentrl.train.open_model import is_run, run_config_path
from agentrl.train.tasks import Splits, bound_lengths, tasks_of
from agentrl.types import Trajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OPTION_OF = {"eval.n": "-n", "eval.val_tasks": "--tasks", "eval.test_tasks": "--tasks"}
"""Settings of a training run for which these commands have an option."""
_CANCEL_TIMEOUT_S = 30.0
"""For episodes to end where another one has failed."""


def playing_config(env_id: str | None, model: str | None, overrides: Sequence[str]) -> Config:
    """Return the settings for playing: those of the run where ``model`` is one.

    Raises:
        ConfigError: no environment is named, the settings cannot work, or an option stands for one.
    """
    from agentrl.cli.options import quote, with_env

    if model is not None and model.startswith((".", "/", "runs/")) and not Path(model).exists():
        raise ConfigError(f"--model {model}: there is no such run, directory or file")
    settings = ["trainer.resume=null", *with_env(tuple(overrides), env_id)]
    if model is not None:
        settings.insert(0, f"model.path={quote(model)}")
    base = from_yaml(run_config_path(model)) if model is not None and is_run(model) else None
    if base is not None:
        base.model.chat_template = None  # the run's tokenizer has it
    config = load(settings, base=base)
    _refuse_settings_of_options(overrides)
    if base is not None:  # the lengths of the run
        return config
    return within_positions(config, settings, announce=partial(say, quiet=config.telemetry.quiet))


def _refuse_settings_of_options(overrides: Sequence[str]) -> None:
    for override in parse(itemised(overrides)):
        option = _OPTION_OF.get(override.key_or_group)
        if option is not None:
            raise ConfigError(
                f"{override.key_or_group}={override.value()} counts in training only; here write "
                f"{option} {override.value()}"
            )


async def play_split(
    config: Config, *, split: str, num_samples: int, num_tasks: int
) -> list[Trajectory]:
    """Sample ``num_samples`` episodes of each of ``num_tasks`` tasks (0: all) of a split.

    With several environments that is the number of tasks of each.

    Raises:
        ConfigError: the counts make no sense, or there is no such split.
        DataError: the split has no tasks in one of the environments.
    """
    if num_samples < 1 or num_tasks < 0:
        raise ConfigError(
            f"-n {num_samples} --tasks {num_tasks}: at least 1 sample, and 0 (all) or more tasks"
        )
    known = (*SPLITS, "all")  # a benchmark such as HumanEval is one split
    if split not in known:
        raise ConfigError(f"--split {split!r} is unknown; known: {', '.join(known)}")
    environments = make_environments(config.env, config.tools)
    if is_run(config.model.path):  # its specs may be for others of its environments
        _tell_of_other_code(config, environments)
    else:
        refuse_idle_specs(environments, config.tools.specs)
    tasks: Splits = {split: {}}
    for item in environments:
        tasks[split][item.name] = found = tasks_of(item, config.data, split)
        check_tasks(found, source=f"{item.name} {split}")
    examples = [found[0] for found in tasks[split].values()]
    async with open_playground(config, environments, examples=examples) as ground:
        bound_lengths(
            tasks,
            environments,
            config.data,
            ground.renderer,
            max_context_tokens=config.rollout.max_context_tokens,
        )
        play = ground.groups(config, evaluation_plan(config, split, num_samples=num_samples))
        pending = [
            asyncio.ensure_future(play(dispatch))
            for name, found in tasks[split].items()
            for dispatch in dispatches(name, choose_tasks(found, num_tasks))
        ]
        limit_s, quiet = config.rollout.collect_timeout_s, config.telemetry.quiet
        groups = await finished(pending, what=f"playing {split}", stall_s=limit_s, quiet=quiet)
    for item in environments:
        own = [group for group in groups if group.env_id == item.name]
        refuse_censored(own, what=f"playing {split!r} of {item.name!r}")
    return [trajectory for group in groups for trajectory in group.trajectories]


def _tell_of_other_code(config: Config, environments: Sequence[Environment]) -> None:
    """Warn where a run's policy is played with other code than it was trained with.

    A resume refuses that, since it would make one training of two. Here nothing of the run is
    written, and to measure it under a grader that was mended is a purpose: so it is only told.
    """
    code = code_files(environments, config.tools.specs) | named_files(config)
    if edited := edited_since(Path(config.model.path), config, stamped(code)):
        logger.warning(
            "this is not what the run %s was trained with: %s. For that, start from the folder "
            "where it was trained, or restore the file",
            config.model.path,
            "; ".join(edited),
        )


async def finished(
    pending: Sequence[asyncio.Future[T]], *, what: str, stall_s: float, quiet: bool
) -> list[T]:
    """Return the results of all, in order, and show how many there are.

    Args:
        pending: what goes on.
        what: it is, for people.
        stall_s: longest time in which none ends.
        quiet: show nothing.

    Raises:
        EngineError: none has ended for ``stall_s``; the others are cancelled.
    """
    bar = track(
        asyncio.as_completed(pending),
        description=what,
        total=len(pending),
        console=Console(stderr=True),
        disable=quiet,
    )
    limit: asyncio.Timeout | None = None
    try:
        for done in bar:
            async with asyncio.timeout(stall_s) as limit:
                await done
    except TimeoutError:
        if limit is None or not limit.expired():  # one of its own
            raise
        num_ended = sum(task.done() for task in pending)
        raise EngineError(stands_still(what, num_ended, len(pending), stall_s)) from None
    finally:
        for task in pending:
            task.cancel()
        # What they play on is closed next: they close what is theirs before.
        await asyncio.wait(pending, timeout=_CANCEL_TIMEOUT_S)
    return [task.result() for task in pending]
