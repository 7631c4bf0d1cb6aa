"""What runs on a rank: a :class:`Worker`, whose registered methods a group calls."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from agentrl.dist.dispatch import Dispatch
from agentrl.dist.ranks import Ranks

_MARK = "__agentrl_call__"
_Method = TypeVar("_Method", bound=Callable)

DEFAULT_TIMEOUT_S = 600.0
"""Deadline of a call that names none."""


@dataclass(slots=True, frozen=True, kw_only=True)
class CallSpec:
    """How a group calls a method."""

    dispatch: Dispatch
    """Splits arguments over ranks and joins their results."""
    timeout_s: float
    """Longest the slowest rank may take, its wait for earlier calls included."""


def register(*, dispatch: Dispatch, timeout_s: float = DEFAULT_TIMEOUT_S):
    """Mark a method of a :class:`Worker` as one that groups call.

    Args:
        dispatch: splits arguments over ranks and joins their results; an instance of a class of
            :mod:`agentrl.dist.dispatch`, or any object with its ``split`` and ``collect``.
        timeout_s: longest that the slowest rank may take.
    """

    def mark(method: _Method) -> _Method:
        setattr(method, _MARK, CallSpec(dispatch=dispatch, timeout_s=timeout_s))
        return method

    return mark


class Worker:
    """Base of what runs on a rank. Built in the rank's own process, after its process group.

    Args:
        ranks: where it stands in its group.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def data_rank(self, mesh: str | None) -> int:
        """Return which share of data-parallel calls this rank computes.

        Ranks that answer the same get the same rows. By default every rank has a share of its own.

        Args:
            mesh: names one of several meshes over the same ranks, such as a role's.
        """
        return self.ranks.rank


def call_spec(worker_class: type[Worker], method: str) -> CallSpec:
    """Return how groups call ``method``.

    Raises:
        AttributeError: it is not registered; lists close names.
    """
    spec = getattr(getattr(worker_class, method, None), _MARK, None)
    if isinstance(spec, CallSpec):
        return spec
    names = registered_methods(worker_class)
    close = difflib.get_close_matches(method, names, n=3) or names
    raise AttributeError(
        f"{worker_class.__name__}.{method} is no method that a group calls; there are "
        f"{', '.join(close) or 'none'}: mark methods with @register(dispatch=...)"
    )


def registered_methods(worker_class: type[Worker]) -> list[str]:
    """Return the names of the methods that groups call, sorted."""
    return sorted(name for name in dir(worker_class) if hasattr(getattr(worker_class, name), _MARK))


def in_words(error: BaseException) -> str:
    """Return type and message of an error, whose own text may fail as well."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # of its __str__, which is its author's
        return f"{type(error).__name__}, whose message cannot be shown"
