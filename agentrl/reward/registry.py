"""Parts of a reward by name.

An entry is a class or function that makes a :data:`~agentrl.reward.part.Grader` from keyword
arguments. Those that it takes under these names are given by the run unless the configuration sets
them: ``part_name`` (of the part), ``config_key`` (where its arguments stand, for messages),
``max_response_tokens`` (``rollout.max_response_tokens``) and ``seed`` (``trainer.seed``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agentrl.errors import AgentRLError, ConfigError
from agentrl.finite import got
from agentrl.kwargs import check_kwargs
from agentrl.registry import Registry
from agentrl.reward.config import Solution
from agentrl.reward.function import RewardFunction
from agentrl.reward.part import Grader
from agentrl.reward.process import DEFAULT_MEMORY_MB, ProcessFunction

Factory = TypeVar("Factory", bound=Callable[..., Any])

ENV = "env"
"""Stands for the environment's own rubric; not an entry of the registry."""

reward_registry: Registry[Callable[..., Any]] = Registry(
    "reward",
    "agentrl.rewards",
    {
        "format": "agentrl.reward.terms:Format",
        "function": "agentrl.reward.registry:function",
        "hf_classifier": "agentrl.reward.classifier:HFClassifier",
        "judge": "agentrl.reward.judge:Judge",
        "overlong": "agentrl.reward.terms:Overlong",
    },
)


def register_reward(name: str) -> Callable[[Factory], Factory]:
    """Decorator: make a class or function known as a part of a reward in this process.

    Raises:
        RegistryError: the name is taken.
    """

    def add(factory: Factory) -> Factory:
        reward_registry.register(name)(factory)
        return factory

    return add


def function(
    *,
    path: str,
    kwargs: dict[str, Any] | None = None,
    solution: str = "last_turn",
    process: bool | None = None,
    processes: int = 4,
    memory_mb: int = DEFAULT_MEMORY_MB,
    part_name: str = "function",
    config_key: str = "reward",
) -> Grader:
    """Make a user's function a grader; see :class:`~agentrl.reward.function.RewardFunction`.

    Args:
        path: ``./file.py:function`` or ``package.module:function``.
        kwargs: its further arguments.
        solution: ``last_turn`` or ``all_turns``.
        process: run it in child processes. None: if it is in a file.
        processes: children at most.
        memory_mb: see :class:`~agentrl.reward.process.ProcessFunction`.

    Raises:
        ConfigError, RegistryError: it cannot be used; see :class:`RewardFunction`.
    """
    if solution not in list(Solution):
        raise ConfigError(f"solution={solution!r}: write {' or '.join(Solution)}")
    if processes < 1:
        raise ConfigError(f"processes={processes}: must be at least 1")
    if memory_mb < 1:
        raise ConfigError(f"memory_mb={memory_mb}: must be at least 1")
    chosen = Solution(solution)
    grader = RewardFunction(path, kwargs=kwargs, solution=chosen, key=config_key)
    if process or (process is None and _is_file(path)):
        return ProcessFunction(
            path,
            part=part_name,
            kwargs=kwargs,
            solution=chosen,
            processes=processes,
            memory_mb=memory_mb,
        )
    return grader


def make_grader(
    reward_id: str, kwargs: Mapping[str, Any], *, given: Mapping[str, Any], key: str
) -> Grader:
    """Make a registered part.

    Args:
        given: what the run knows, handed on where the entry takes it.
        key: where the arguments stand in the configuration, for messages.

    Raises:
        ConfigError, RegistryError: no such part, or arguments that it cannot use.
    """
    factory = reward_registry.get(reward_id)
    try:
        taken = inspect.signature(factory).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}.id={reward_id!r} is {got(factory)}; it must be a class or a function that "
            "makes a grader, with a signature that can be read"
        ) from error
    arguments = {name: value for name, value in given.items() if name in taken} | dict(kwargs)
    check_kwargs(factory, arguments, key=f"{key}.kwargs")
    try:
        return factory(**arguments)
    except AgentRLError as error:
        if str(error).startswith(key):
            raise
        raise type(error)(f"{key}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key}: making {reward_id!r} raised {type(error).__name__}: {error}"
        ) from error


def _is_file(path: str) -> bool:
    return path.rpartition(":")[0].endswith(".py")
