"""Environments by name: a registered id, ``package.module:Class``, or ``./file.py:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from agentrl.env.base import AsyncEnv, Env
from agentrl.errors import AgentRLError, EnvError, RegistryError
from agentrl.kwargs import check_kwargs
from agentrl.registry import Registry

EnvClass = TypeVar("EnvClass", bound=type)

env_registry: Registry[type[Env]] = Registry("environment", "agentrl.envs")


def register_env(name: str) -> Callable[[EnvClass], EnvClass]:
    """Class decorator: make the environment known as ``name`` in this process.

    Processes that never import the module do not see it: a pack declares an entry point of group
    ``agentrl.envs`` instead.

    Raises:
        RegistryError: the name is taken.
    """

    def add(cls: EnvClass) -> EnvClass:
        env_registry.register(name)(cls)
        return cls

    return add


def env_class(env_id: str) -> type[Env]:
    """Resolve an id to the class.

    Raises:
        RegistryError: nothing of that name, it cannot be imported, or it is no environment.
    """
    cls: Any = env_registry.get(env_id)
    if not isinstance(cls, type) or not (issubclass(cls, Env) or is_async_class(cls)):
        raise RegistryError(
            f"environment {env_id!r} is {cls!r}, which is no environment; "
            "give a subclass of agentrl.Env, or a class with coroutines reset, step and close"
        )
    return cls


def is_async_class(cls: type) -> bool:
    """Return whether ``cls`` follows :class:`~agentrl.env.base.AsyncEnv`."""
    return all(
        inspect.iscoroutinefunction(getattr(cls, name, None)) for name in ("reset", "step", "close")
    )


def runs_in_process(env_id: str, process: bool | None) -> bool:
    """Decide where environments of this id run.

    The user's choice wins, then what the class says, then: a file of the user's runs in a process.
    """
    if process is not None:
        return process
    cls = env_class(env_id)
    for base in cls.__mro__:
        if base is Env:
            break
        if "process" in vars(base):
            return bool(vars(base)["process"])
    return env_id.rpartition(":")[0].endswith(".py") and issubclass(cls, Env)


def make_env(
    env_id: str, kwargs: Mapping[str, Any] | None = None, *, key: str = "env.kwargs"
) -> Env | AsyncEnv:
    """Construct an environment; its arguments are checked against the class first.

    Args:
        key: where the arguments stand in the configuration, for messages.

    Raises:
        RegistryError: no such environment.
        ConfigError: an argument it does not take, lacks, or takes with another type.
        EnvError: the constructor raised.
    """
    cls = env_class(env_id)
    arguments = dict(kwargs or {})
    check_kwargs(cls, arguments, key=key)
    try:
        return cls(**arguments)
    except AgentRLError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvError(
            f"environment {env_id!r}: the constructor raised {type(error).__name__}: {error}"
        ) from error
