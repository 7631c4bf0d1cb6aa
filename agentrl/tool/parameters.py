"""The ``parameters`` of a tool: a JSON Schema, refused where a model could not follow it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

_SAYS_WHAT = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")
_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
_SAME_VALUE_LISTS = ("allOf", "anyOf", "oneOf")
_SAME_VALUE = ("not", "if", "then", "else")
"""Keywords whose schemas are of the same value, so that a reference back is a loop."""
_INNER_VALUES = ("additionalProperties", "propertyNames", "contains")
_ONE = (*_INNER_VALUES, *_SAME_VALUE, "items", "unevaluatedItems", "unevaluatedProperties")
_LISTS = (*_SAME_VALUE_LISTS, "prefixItems")
_MAPS = ("properties", "dependentSchemas", "$defs", "definitions")
"""All keywords that hold one schema, a list of them, or a mapping to them."""
_REFUSED = {
    "patternProperties": "is refused; use additionalProperties",
    "$dynamicRef": "is refused; use $ref to '#/$defs/NAME'",
    "$id": "is refused below the top: it changes what references inside mean",
}

Path = tuple[str | int, ...]


class SchemaProblem(NamedTuple):
    """What is wrong with a schema, and where in it."""

    path: Path
    problem: str


def parameters_problem(parameters: Any) -> SchemaProblem | None:
    """Return what is wrong with a ``parameters`` schema; None if nothing.

    Wrong is: no object schema, a property without a type, a required name that is no property, a
    reference that is remote, missing or leads back to itself, a number that JSON lacks.
    """
    try:
        _check(parameters)
    except _Refused as refused:
        return SchemaProblem(*refused.args)
    except RecursionError:
        return SchemaProblem((), "is nested too deeply, or holds a pattern that is")
    return None


class _Refused(Exception):
    """Leaves the recursion; never leaves this module."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem)


def _check(parameters: Any) -> None:
    if not isinstance(parameters, Mapping):
        raise _Refused(
            (),
            "must be a JSON Schema (a mapping with type: object and properties), got "
            f"{type(parameters).__name__}",
        )
    _check_numbers(parameters, ())
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        message = error.message if len(error.message) <= 300 else f"{error.message[:297]}..."
        if error.absolute_path and error.absolute_path[-1] == "type":
            message = f"{error.instance!r} is no type; types are {', '.join(_TYPES)}"
        raise _Refused(tuple(error.absolute_path), message) from None
    if parameters.get("type") != "object":
        at: Path = ("type",) if "type" in parameters else ()
        raise _Refused(at, f"type must be 'object', got {parameters.get('type')!r}")
    _check_everywhere(parameters, parameters, ())
    _check_inside(parameters, parameters, (), ())


def _check_everywhere(schema: Any, root: Mapping[str, Any], path: Path) -> None:
    """Refuse, in whatever place a schema may stand, what would fail when a model calls."""
    if not isinstance(schema, Mapping):
        return
    for key in _REFUSED:
        if key in schema and (path or key != "$id"):
            raise _Refused((*path, key), _REFUSED[key])
    try:
        regex.compile(schema.get("pattern", ""))
    except regex.error as error:
        raise _Refused((*path, "pattern"), f"is no regular expression: {error}") from None
    if "$ref" in schema:
        _resolve(schema["$ref"], root, (*path, "$ref"))
    for key in _ONE:
        _check_everywhere(schema.get(key), root, (*path, key))
    for key in _LISTS:
        for index, inner in enumerate(schema.get(key, ())):
            _check_everywhere(inner, root, (*path, key, index))
    for key in _MAPS:
        for name, inner in schema.get(key, {}).items():
            _check_everywhere(inner, root, (*path, key, name))


def _check_numbers(value: Any, path: Path) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise _Refused(path, f"{value} is no number of JSON")
    items: Iterator[tuple[str | int, Any]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(enumerate(value))
    for key, inner in items:
        _check_numbers(inner, (*path, key))


def _check_value(schema: Any, root: Mapping[str, Any], path: Path, seen: tuple[str, ...]) -> None:
    """Check the schema of a value; ``seen`` are the references that led here for the same value."""
    if not isinstance(schema, Mapping) or not any(key in schema for key in _SAYS_WHAT):
        raise _Refused(path, "says no type; add type: string (or number, object, ...)")
    _check_inside(schema, root, path, seen)


def _check_inside(
    schema: Mapping[str, Any], root: Mapping[str, Any], path: Path, seen: tuple[str, ...]
) -> None:
    reference = schema.get("$ref")
    if reference is not None:
        if reference in seen:
            raise _Refused((*path, "$ref"), f"{reference!r} leads back to itself")
        target = _resolve(reference, root, (*path, "$ref"))
        # A value further inside may be of the same schema (a tree): looked at once.
        _check_reference(target, root, (*path, "$ref"), (*seen, reference))
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in properties]
    if missing:
        index = list(schema["required"]).index(missing[0])
        raise _Refused(
            (*path, "required", index),
            f"required names {missing[0]!r}, which is not in properties "
            f"({', '.join(properties) or 'none'})",
        )
    for name, inner in properties.items():
        _check_value(inner, root, (*path, "properties", name), ())
    if isinstance(schema.get("items"), Mapping):
        _check_value(schema["items"], root, (*path, "items"), ())
    for key in _INNER_VALUES:
        if isinstance(schema.get(key), Mapping):
            _check_inside(schema[key], root, (*path, key), ())
    for key in _SAME_VALUE_LISTS:
        for index, inner in enumerate(schema.get(key, ())):
            _check_value(inner, root, (*path, key, index), seen)
    for key in _SAME_VALUE:
        if isinstance(schema.get(key), Mapping):
            _check_inside(schema[key], root, (*path, key), seen)
    for name, inner in schema.get("dependentSchemas", {}).items():
        if isinstance(inner, Mapping):
            _check_inside(inner, root, (*path, "dependentSchemas", name), seen)


def _check_reference(
    target: Any, root: Mapping[str, Any], path: Path, seen: tuple[str, ...]
) -> None:
    """Follow a chain of references for one value; what a target holds is checked at its place."""
    if not isinstance(target, Mapping) or not any(key in target for key in _SAYS_WHAT):
        raise _Refused(path, "leads to a schema that says no type")
    inner = [target, *(target[key] for key in _SAME_VALUE if isinstance(target.get(key), Mapping))]
    for key in _SAME_VALUE_LISTS:
        inner += [item for item in target.get(key, ()) if isinstance(item, Mapping)]
    dependent = target.get("dependentSchemas", {}).values()
    inner += [item for item in dependent if isinstance(item, Mapping)]
    for schema in inner:
        reference = schema.get("$ref")
        if reference is None:
            continue
        if reference in seen:
            raise _Refused(path, f"{reference!r} leads back to itself")
        _check_reference(_resolve(reference, root, path), root, path, (*seen, reference))


def _resolve(reference: str, root: Mapping[str, Any], path: Path) -> Any:
    if not reference.startswith("#/"):
        raise _Refused(path, f"{reference!r} is not local; use '#/$defs/NAME'")
    value: Any = root
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(value, Mapping) or part not in value:
            raise _Refused(path, f"{reference!r} leads nowhere")
        value = value[part]
    return value
