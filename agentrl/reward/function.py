"""A user's grading function: found, its signature understood, its arguments checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from agentrl.env.base import Episode
from agentrl.errors import ConfigError, RewardError
from agentrl.finite import got
from agentrl.kwargs import check_kwargs
from agentrl.registry import load_object
from agentrl.reward.config import Solution
from agentrl.reward.conversation import solution_text
from agentrl.types import Task

_OF_TASK = ("data_source", "solution_str", "ground_truth")
_SIGNATURES = (
    "fn(episode, **kwargs) or fn(data_source, solution_str, ground_truth, extra_info=None, "
    "**kwargs), sync or async"
)


class RewardFunction:
    """A function as a grader. Which of two signatures it has is told by its parameters' names.

    * ``fn(episode, **kwargs)`` gets the :class:`~agentrl.env.base.Episode`.
    * ``fn(data_source, solution_str, ground_truth, extra_info=None, **kwargs)``, the signature of
      verl's ``compute_score``, gets the model's text and, of ``task.data``, ``data_source``,
      ``reward_model.ground_truth`` (or ``ground_truth``) and ``extra_info``.

    Either returns a float, a :class:`~agentrl.types.Score`, or a mapping with ``score``.

    Args:
        function: the function itself or its import path.
        kwargs: handed on at every call. ``data_source`` may stand here where tasks have none.
        solution: what ``solution_str`` is.
        key: where the function stands in the configuration, for messages.

    Raises:
        ConfigError: another signature, or arguments that it does not take.
        RegistryError: it cannot be imported.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        kwargs: Mapping[str, Any] | None = None,
        solution: Solution = Solution.last_turn,
        key: str = "reward",
    ) -> None:
        found: Any = function
        if isinstance(function, str):
            found = load_object(function, kind=f"{key}.path")
        self.name = function if isinstance(function, str) else getattr(found, "__name__", "it")
        self._kwargs = dict(kwargs or {})
        self._solution = solution
        self._parameters = _parameters(found, where=f"{key}.path={self.name}")
        by_name = {
            name
            for name, parameter in self._parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        self.of_task = by_name.issuperset(_OF_TASK)
        if not self.of_task and "episode" not in by_name:
            raise ConfigError(
                f"{key}.path={self.name}: the function must be {_SIGNATURES}; got "
                f"{getattr(found, '__name__', 'it')}({', '.join(self._parameters)})"
            )
        if self.of_task and "episode" in by_name and "episode" not in self._kwargs:
            raise ConfigError(
                f"{key}.path={self.name} takes episode beside data_source, solution_str and "
                "ground_truth, but a function is given one or the other; write it as "
                "fn(episode, **kwargs), which finds the others in episode.task.data and "
                "episode.messages, or leave episode out"
            )
        self._takes_extra_info = "extra_info" in self._parameters or any(
            parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values()
        )
        self.function: Callable[..., Any] = found
        self._check_kwargs(key)

    def check_task(self, task: Task) -> None:
        """Refuse a task that lacks what the function is given.

        Raises:
            RewardError: names what is missing, and what the task has.
        """
        if self.of_task:
            self._of_task(task)

    def __call__(self, episode: Episode) -> Any:
        """Return what the function says of the episode, or an awaitable of it."""
        if not self.of_task:
            return self.function(episode=episode, **self._kwargs)
        given = self._of_task(episode.task)
        given["solution_str"] = solution_text(episode, self._solution)
        return self.function(**{**given, **self._kwargs})

    def _of_task(self, task: Task) -> dict[str, Any]:
        data = task.data
        given: dict[str, Any] = {}
        nested = data.get("reward_model")
        if isinstance(nested, Mapping) and "ground_truth" in nested:
            given["ground_truth"] = nested["ground_truth"]
        elif "ground_truth" in data:
            given["ground_truth"] = data["ground_truth"]
        else:
            raise self._lacks(
                task,
                "'reward_model': {'ground_truth': ...}",
                "map a column of the data to reward_model.ground_truth",
            )
        if "data_source" in data:
            given["data_source"] = data["data_source"]
        elif "data_source" not in self._kwargs:
            raise self._lacks(
                task, "'data_source'", "set reward.kwargs.data_source, one for all tasks"
            )
        if self._takes_extra_info:
            given["extra_info"] = data.get("extra_info")
        return given

    def _lacks(self, task: Task, what: str, fix: str) -> RewardError:
        return RewardError(
            f"{self.name} takes (data_source, solution_str, ground_truth), but the data of task "
            f"{task.id!r} have no {what}, only: {', '.join(map(repr, task.data)) or 'nothing'}; "
            f"{fix}, or write the function as fn(episode)"
        )

    def _check_kwargs(self, key: str) -> None:
        given = {"episode"}
        if self.of_task:
            given = {"solution_str", "ground_truth", "extra_info"}
            if "data_source" not in self._kwargs:
                given.add("data_source")
        for name in self._kwargs:
            if name in given:
                raise ConfigError(
                    f"{key}.kwargs.{name}: {self.name} gets {name} from the episode; leave it out"
                )
        check_kwargs(_without(self.function, given, self._parameters), self._kwargs,
                     key=f"{key}.kwargs")  # fmt: skip


def _parameters(found: Any, *, where: str) -> Mapping[str, inspect.Parameter]:
    if not callable(found) or isinstance(found, type):
        raise ConfigError(
            f"{where} is no function but {got(found)}; give {_SIGNATURES}. A class with a method "
            "score(episode) is a part: reward.parts=[{id: './file.py:Class'}]"
        )
    try:
        return inspect.signature(found).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: its signature cannot be read; give {_SIGNATURES}") from error


def _without(
    function: Callable[..., Any], given: set[str], parameters: Mapping[str, inspect.Parameter]
) -> Callable[..., Any]:
    """Return what shows the signature of ``function`` without the arguments that we give."""

    def shown() -> None: ...

    try:
        hints = get_type_hints(function)
    except Exception:  # an annotation that only a type checker can resolve
        hints = {}
    left = [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        else parameter
        for name, parameter in parameters.items()
        if name not in given and parameter.kind is not parameter.VAR_POSITIONAL
    ]
    shown.__name__ = getattr(function, "__name__", "the function")
    shown.__annotations__ = {name: kind for name, kind in hints.items() if name not in given}
    shown.__signature__ = inspect.Signature(left)  # pyright: ignore[reportFunctionMemberAccess]
    return shown
