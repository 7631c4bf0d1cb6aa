"""The tasks of a run: of files or environments, checked, and the order in which they come."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from agentrl.agent.renderer import Renderer
from agentrl.data.config import CurriculumConfig, DataConfig
from agentrl.data.length import CountTokens, bound_prompts
from agentrl.data.load import read_tasks
from agentrl.env.base import Env
from agentrl.errors import AgentRLError, ConfigError
from agentrl.kwargs import check_kwargs
from agentrl.rollout.curriculum import Curriculum, curriculum_registry
from agentrl.rollout.feed import TaskFeed
from agentrl.rollout.mix import MixedStream
from agentrl.rollout.tasks import (
    TaskStream,
    check_disjoint,
    check_tasks,
    fingerprint,
    read_split,
)
from agentrl.seeding import derive_seed
from agentrl.tool.binding import Toolbox
from agentrl.train.config import MAX_STEPS, TrainerConfig
from agentrl.train.environments import Environment
from agentrl.train.state_file import check_storable
from agentrl.types import Message, Task

HELD_OUT = ("val", "test")
Splits: TypeAlias = dict[str, dict[str, Sequence[Task]]]
"""Split -> name of the environment -> tasks."""


def tasks_of(item: Environment, data: DataConfig, split: str) -> Sequence[Task]:
    """Return the tasks of a split: of its file where it has one, else of the environment.

    A held-out split of an environment without tasks of its own is empty where ``data.train`` is
    given.

    Raises:
        EnvError: the environment cannot be asked, or has something else than sound tasks.
        DataError, ConfigError: the file cannot be read.
    """
    if split in data.sources():
        return read_tasks(data, split)
    if split != "train" and data.train is not None and type(item.env).tasks is Env.tasks:
        return []
    entry = item.entry.config
    return read_split(item.env, split, env_id=entry.id, timeout_s=entry.tasks_timeout_s)


def load_tasks(environments: Sequence[Environment], data: DataConfig) -> Splits:
    """Read every split of every environment and check it.

    Ids are unique, and evaluation is disjoint from training, within an environment.

    Raises:
        EnvError: a split cannot be read, or holds something else than sound tasks.
        DataError: an empty train split, repeated ids, or splits that overlap.
        ConfigError: a file that needs a package which is not installed.
    """
    tasks: Splits = {split: {} for split in ("train", *HELD_OUT)}
    for item in environments:
        for split, found in tasks.items():
            found[item.name] = tasks_of(item, data, split)
        train = tasks["train"][item.name]
        check_tasks(train, source=f"{item.name} train")
        for split in HELD_OUT:
            held_out = tasks[split][item.name]
            if len(held_out):
                label = f"{item.entry.namespace} {split}".strip()
                check_tasks(held_out, source=f"{item.name} {split}")
                check_disjoint(train, held_out, split=label)
    return tasks


def bound_lengths(
    tasks: Splits,
    environments: Sequence[Environment],
    data: DataConfig,
    renderer: Renderer,
    *,
    max_context_tokens: int,
) -> dict[str, int]:
    """Apply ``data.max_prompt_tokens`` to the splits that come from files, in place.

    Without it, prompts are bounded by the context less the one token that a turn has at least: an
    episode with a longer one could not begin.

    Returns:
        Split -> tasks that were dropped, for those splits.

    Raises:
        DataError: prompts are to be refused, or none is left.
    """
    dropped: dict[str, int] = {}
    if data.columns.prompt is None:
        return dropped
    limit = data.max_prompt_tokens or max_context_tokens - 1
    for split in data.sources().keys() & tasks.keys():
        for item in environments:
            bounded = bound_prompts(
                tasks[split][item.name],
                max_tokens=limit,
                policy=data.overlong_prompts,
                count_tokens=_upper_bound(prompt_counter(renderer, item.toolbox), limit),
                key=f"data.{split}",
            )
            tasks[split][item.name] = bounded.tasks
            if data.max_prompt_tokens is not None or bounded.dropped:
                dropped[split] = dropped.get(split, 0) + len(bounded.dropped)
    return dropped


def _upper_bound(count: CountTokens, limit: int) -> CountTokens:
    """Count tokens only where the bytes leave a doubt: a token stands for one byte at least."""
    frame = count([{"role": "user", "content": "x"}])  # what the template itself takes

    def bounded(messages: Sequence[Message]) -> int:
        if any(message.keys() > {"role", "content"} for message in messages):
            return count(messages)  # calls of tools, which the template spells as it likes
        num_bytes = sum(len(message["content"].encode(errors="replace")) for message in messages)
        at_most = num_bytes + frame * len(messages)
        return at_most if at_most <= limit else count(messages)

    return bounded


def prompt_counter(renderer: Renderer, toolbox: Toolbox) -> CountTokens:
    """Return what counts the tokens of a first prompt, schemas of the tools included."""
    schemas = toolbox.schemas

    def count(messages: Sequence[Message]) -> int:
        return len(renderer.begin(messages, schemas).record.ids)

    return count


def describe(tasks: Splits, data: DataConfig, dropped: Mapping[str, int]) -> str:
    """Say in one line how many tasks there are, where they come from, and what was left out."""
    parts = []
    for split, by_env in tasks.items():
        source = data.sources().get(split, "of the environment")
        left_out = dropped.get(split, 0)
        note = f"; {left_out} prompts too long" if left_out else ""
        parts.append(f"{sum(map(len, by_env.values()))} {split} ({source}{note})")
    return "tasks: " + ", ".join(parts)


def total_steps(trainer: TrainerConfig, num_tasks: int) -> int:
    """Return the steps of a run: as set, or those in which ``trainer.epochs`` are dealt out.

    The last step of an epoch goes on into the next one, so every task is dealt ``epochs`` times,
    and less than a step's worth of them once more.

    Raises:
        ConfigError: more than :data:`~agentrl.train.config.MAX_STEPS`.
    """
    if trainer.epochs is None:
        return trainer.total_steps
    steps = trainer.epochs * num_tasks / trainer.prompts_per_step
    if not steps <= MAX_STEPS:
        raise ConfigError(
            f"trainer.epochs={trainer.epochs} over {num_tasks} tasks makes {steps:.3g} steps of "
            f"trainer.prompts_per_step={trainer.prompts_per_step}: at most {MAX_STEPS} can be "
            "trained; lower trainer.epochs"
        )
    return max(1, math.ceil(round(steps, 9)))


def open_feed(
    tasks: Splits,
    environments: Sequence[Environment],
    curriculum: CurriculumConfig,
    *,
    seed: int,
    dropped: Mapping[str, int],
) -> TaskFeed:
    """Shuffle each environment's tasks into epochs of its own, mix them by weight, and feed them.

    Raises:
        RegistryError, ConfigError: no such curriculum, or arguments that it does not take.
        TrainingError: a curriculum whose state no checkpoint could hold.
    """
    streams, weights, prints = {}, {}, []
    for item in environments:
        namespace, train = item.entry.namespace, tasks["train"][item.name]
        source = f"{item.name} train"
        own_seed = derive_seed(seed, namespace) if namespace else seed
        streams[item.name] = TaskStream(train, seed=own_seed, source=source)
        weights[item.name] = item.entry.weight
        prints.append(fingerprint(train, source=source))
    feed = TaskFeed(
        MixedStream(streams, weights),
        curriculum=open_curriculum(curriculum),
        max_skips=curriculum.max_skips,
        fingerprint="-".join(prints),
        facts={"data/dropped_long": dropped["train"]} if "train" in dropped else {},
        check_storable=check_storable,
    )
    feed.check_state()
    return feed


def open_curriculum(config: CurriculumConfig) -> Curriculum | None:
    """Make the curriculum that is named; None where none is.

    Raises:
        RegistryError: no such curriculum.
        ConfigError: arguments that it does not take, a constructor that raises, or an object that
            is no curriculum.
    """
    if config.id is None:
        return None
    made = curriculum_registry.get(config.id)
    check_kwargs(made, config.kwargs, key="data.curriculum.kwargs")
    try:
        curriculum = made(**config.kwargs)
    except (AgentRLError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an exit would end the run as if it were done
        raise ConfigError(
            f"data.curriculum.id={config.id!r}: its constructor raised {type(error).__name__}: "
            f"{error}; mend it, change data.curriculum.kwargs, or set data.curriculum.id=null"
        ) from error
    missing = [
        name
        for name in ("accept", "update", "state_dict", "load_state_dict")
        if not callable(getattr(curriculum, name, None))
    ]
    if missing:
        raise ConfigError(
            f"data.curriculum.id={config.id!r} makes a {type(curriculum).__name__} without "
            f"{', '.join(missing)}: give what agentrl.rollout.curriculum.Curriculum asks for"
        )
    return curriculum
