"""Check the arguments of a pluggable part against its signature, before anything runs."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from agentrl.errors import ConfigError


def check_kwargs(
    target: Callable[..., Any],
    kwargs: Mapping[str, Any],
    *,
    key: str,
    given: Collection[str] = (),
) -> None:
    """Refuse arguments that ``target`` does not take, lacks, or declares with another type.

    Only scalar annotations (``int``, ``float``, ``bool``, ``str``, ``Literal`` and unions of them)
    are compared with the value; anything richer is the target's own business.

    Args:
        target: a class or function.
        kwargs: what it would be called with.
        key: where the arguments stand in the configuration, for messages ("env.kwargs").
        given: parameters that the caller fills in itself.

    Raises:
        ConfigError: names the argument, what was got, and what would be right.
    """
    parameters = _parameters(target)
    name = getattr(target, "__name__", str(target))
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        p.name: p
        for p in parameters.values()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in given
    }
    for argument in kwargs:
        if argument not in named and not takes_any:
            close = difflib.get_close_matches(argument, named, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"{key}.{argument}: {name} takes no such argument; {hint}"
                f"it takes: {', '.join(named) or 'none'}"
            )
    missing = [p.name for p in named.values() if p.default is p.empty and p.name not in kwargs]
    if missing:
        raise ConfigError(f"{key}: {name} needs {', '.join(missing)}; set {key}.{missing[0]}=...")
    hints = _hints(target)
    for argument, value in kwargs.items():
        if argument in hints and not _matches(value, hints[argument]):
            raise ConfigError(
                f"{key}.{argument}: {name} takes {_describe(hints[argument])}, "
                f"got {value!r} ({type(value).__name__})"
            )


def _parameters(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    if isinstance(target, type) and target.__init__ is object.__init__:
        return {}
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # written in C: its own errors have to do
        return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    function = target.__init__ if isinstance(target, type) else target
    try:
        return get_type_hints(function)
    except Exception:  # whatever one annotation raises, the others are looked at alone
        found: dict[str, Any] = {}
        for name, annotation in getattr(function, "__annotations__", {}).items():
            alone = types.SimpleNamespace(__annotations__={name: annotation})
            with suppress(Exception):  # one that only a type checker can resolve
                found |= get_type_hints(alone, getattr(function, "__globals__", {}))
        return found


_SCALARS: dict[Any, tuple[type, ...]] = {
    int: (int,),
    float: (float, int),
    str: (str,),
    bool: (bool,),
    type(None): (type(None),),
}


def _matches(value: Any, hint: Any) -> bool:
    if hint in _SCALARS:
        return isinstance(value, _SCALARS[hint]) and (hint is bool or not isinstance(value, bool))
    origin = get_origin(hint)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if origin in (Union, types.UnionType):
        return any(_matches(value, member) for member in get_args(hint))
    return True


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(hint))
    return getattr(hint, "__name__", str(hint)).replace("NoneType", "None")
