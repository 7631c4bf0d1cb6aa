"""From a type annotation to the JSON Schema of the values that it takes, and back from JSON.

Understood: ``str``, ``int``, ``float``, ``bool``, ``None``, ``Literal``, ``Enum``, unions and
``Optional``, ``list``, ``Sequence``, ``tuple[X, ...]``, ``dict[str, X]``, ``Mapping``, dataclasses,
``TypedDict``, and ``Annotated[X, "what it is"]`` around any of them.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import json
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from agentrl.errors import ToolSpecError

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable)
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


@dataclass(slots=True, frozen=True)
class Described:
    """What an annotation stands for."""

    schema: dict[str, Any]
    convert: Callable[[Any], Any] | None = None
    """From the JSON value to what the annotation names; None where they are the same."""


def describe(hint: Any, *, where: str, inside: tuple[type, ...] = ()) -> Described:
    """Return the schema of an annotation, and how to make its values from JSON.

    Args:
        hint: resolved, with its ``Annotated``.
        where: names the parameter, for messages.
        inside: dataclasses and TypedDicts that this annotation is part of.

    Raises:
        ToolSpecError: JSON has nothing that is meant by it.
    """
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        found = describe(inner, where=where, inside=inside)
        text = next((note for note in notes if isinstance(note, str)), None)
        schema = found.schema if text is None else {**found.schema, "description": text}
        return Described(schema, found.convert)
    if hint in _SCALARS:
        return Described({"type": _SCALARS[hint]})
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return Described(_choices(list(args), where))
    if origin in (Union, types.UnionType):
        return _union(args, where, inside)
    if hint in _LISTS or hint in _DICTS:
        return Described({"type": "array" if hint in _LISTS else "object"})
    if origin in _LISTS or (origin is tuple and len(args) == 2 and args[1] is Ellipsis):
        return _array(args[0], origin is tuple, where, inside)
    if origin in _DICTS:
        return _dictionary(args, where, inside)
    if isinstance(hint, type):
        return _class(hint, where, inside)
    raise _cannot(hint, where)


def _cannot(hint: Any, where: str) -> ToolSpecError:
    name = getattr(hint, "__name__", None) or str(hint)
    return ToolSpecError(
        f"{where}: a model cannot be asked for {name} in JSON; use str, int, float, bool, Literal, "
        "an Enum, a list, a dict with text as keys, a dataclass or a TypedDict, or a union of them"
    )


def _choices(values: list[Any], where: str) -> dict[str, Any]:
    kinds = {type(value) for value in values}
    if not kinds <= set(_SCALARS):
        raise ToolSpecError(f"{where}: choices must be text, numbers or booleans, got {values!r}")
    named = [_SCALARS[kind] for kind in _SCALARS if kind in kinds]
    return {"type": named[0] if len(named) == 1 else named, "enum": values}


def _union(args: tuple[Any, ...], where: str, inside: tuple[type, ...]) -> Described:
    members = [describe(arg, where=where, inside=inside) for arg in args]
    converting = [member for member in members if member.convert is not None]
    if len(converting) > 1:
        raise ToolSpecError(
            f"{where}: a union may hold one dataclass or Enum, since JSON does not say which of "
            "two is meant"
        )
    schemas = [member.schema for member in members]
    convert = None
    if converting:
        inner = converting[0].convert
        takes = (dict,) if converting[0].schema["type"] == "object" else (str, int, float)
        convert = lambda value: inner(value) if inner and isinstance(value, takes) else value  # noqa: E731
    if all(set(schema) == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        return Described({"type": [schema["type"] for schema in schemas]}, convert)
    rest = [schema for schema in schemas if schema != {"type": "null"}]
    if len(rest) == 1 and len(schemas) == 2 and "enum" in rest[0]:
        kind = rest[0]["type"]
        kinds = [*([kind] if isinstance(kind, str) else kind), "null"]
        return Described({**rest[0], "type": kinds, "enum": [*rest[0]["enum"], None]}, convert)
    return Described({"anyOf": schemas}, convert)


def _array(item: Any, is_tuple: bool, where: str, inside: tuple[type, ...]) -> Described:
    found = describe(item, where=f"{where}, items", inside=inside)
    inner = found.convert
    schema = {"type": "array", "items": found.schema}
    make: Any = tuple if is_tuple else list
    if inner is None:
        return Described(schema, tuple if is_tuple else None)
    return Described(schema, lambda values: make(inner(value) for value in values))


def _dictionary(args: tuple[Any, ...], where: str, inside: tuple[type, ...]) -> Described:
    if args[0] is not str:
        raise ToolSpecError(f"{where}: the keys of a JSON object are text; use dict[str, ...]")
    if args[1] is Any:
        return Described({"type": "object"})
    found = describe(args[1], where=f"{where}, values", inside=inside)
    inner = found.convert
    schema = {"type": "object", "additionalProperties": found.schema}
    if inner is None:
        return Described(schema)
    return Described(schema, lambda values: {key: inner(value) for key, value in values.items()})


def _class(hint: type, where: str, inside: tuple[type, ...]) -> Described:
    if hint in inside:
        raise ToolSpecError(f"{where}: {hint.__name__} holds itself; a tool's types must end")
    if issubclass(hint, enum.Enum):
        return Described(_choices([member.value for member in hint], where), hint)
    if is_typeddict(hint):
        return _typed_dict(hint, where, (*inside, hint))
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, where, (*inside, hint))
    raise _cannot(hint, where)


def _typed_dict(hint: Any, where: str, inside: tuple[type, ...]) -> Described:
    found, required = {}, []
    for name, inner in _hints(hint, where).items():
        said = get_origin(inner)
        if said in (Required, NotRequired):
            inner = get_args(inner)[0]
        found[name] = describe(inner, where=f"{where}.{name}", inside=inside)
        # A class with its annotations as text counts NotRequired among the required keys.
        if said is Required or (said is not NotRequired and name in hint.__required_keys__):
            required.append(name)
    return _record(found, required, None)


def _dataclass(hint: Any, where: str, inside: tuple[type, ...]) -> Described:
    hints = _hints(hint, where)
    found, required = {}, []
    for field in dataclasses.fields(hint):
        if not field.init:
            continue
        inner = describe(hints[field.name], where=f"{where}.{field.name}", inside=inside)
        if field.default is not dataclasses.MISSING:
            inner = with_default(inner, field.default)
        elif field.default_factory is dataclasses.MISSING:
            required.append(field.name)
        found[field.name] = inner
    return _record(found, required, hint)


def _record(found: dict[str, Described], required: list[str], make: Any) -> Described:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: inner.schema for name, inner in found.items()},
        "required": required,
        "additionalProperties": False,
    }
    converters = {name: inner.convert for name, inner in found.items() if inner.convert}
    if make is None and not converters:
        return Described(schema)

    def convert(values: Any) -> Any:
        if not isinstance(values, dict):  # already made, by a caller in Python
            return values
        converted = convert_values(values, converters)
        return converted if make is None else make(**converted)

    return Described(schema, convert)


def convert_values(
    values: dict[str, Any], converters: dict[str, Callable[[Any], Any]]
) -> dict[str, Any]:
    """Return ``values`` with those converted that have a converter."""
    return {
        name: converters[name](value) if name in converters else value
        for name, value in values.items()
    }


def with_default(found: Described, default: Any) -> Described:
    """Tell the model a default, where JSON has it."""
    if isinstance(default, enum.Enum):
        default = default.value
    if default is None:  # said by leaving it out
        return found
    try:
        default = json.loads(json.dumps(default, allow_nan=False))
    except (TypeError, ValueError):
        return found
    return Described({**found.schema, "default": default}, found.convert)


def _hints(hint: Any, where: str) -> dict[str, Any]:
    try:
        return get_type_hints(hint, include_extras=True)
    except Exception as error:
        raise ToolSpecError(
            f"{where}: the annotations of {hint.__name__} cannot be resolved "
            f"({type(error).__name__}: {error}); define the types at the top of the module"
        ) from error
