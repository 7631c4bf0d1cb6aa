"""JSON Schemas of tool parameters: refused when they cannot mean anything, then used to check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from agentrl.errors import ToolSpecError
from agentrl.tool.explain import explain

_SAYS_WHAT = ("type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref")


def check_schema(parameters: Any, *, where: str) -> None:
    """Refuse a ``parameters`` schema that a model could not be asked to follow.

    Raises:
        ToolSpecError: no object schema, a property without a type, a required name that is no
            property, a reference that is remote, missing or circular.
    """
    if not isinstance(parameters, Mapping):
        raise ToolSpecError(
            f"{where}: parameters must be a JSON Schema (a mapping with type: object and "
            f"properties), got {type(parameters).__name__}"
        )
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        path = ".".join(str(part) for part in error.absolute_path) or "the top"
        raise ToolSpecError(f"{where}: parameters, at {path}: {error.message}") from error
    if parameters.get("type") != "object":
        raise ToolSpecError(
            f"{where}: parameters.type must be 'object', got {parameters.get('type')!r}"
        )
    _check_properties(parameters, parameters, f"{where}: parameters", ())


def _check_properties(
    schema: Mapping[str, Any], root: Mapping[str, Any], where: str, seen: tuple[str, ...]
) -> None:
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in properties]
    if missing:
        raise ToolSpecError(
            f"{where}.required names {missing[0]!r}, which is not in properties "
            f"({', '.join(properties) or 'none'})"
        )
    for name, inner in properties.items():
        _check_value(inner, root, f"{where}.properties.{name}", seen)


def _check_value(schema: Any, root: Mapping[str, Any], where: str, seen: tuple[str, ...]) -> None:
    if not isinstance(schema, Mapping) or not any(key in schema for key in _SAYS_WHAT):
        raise ToolSpecError(f"{where}: says no type; add type: string (or number, object, ...)")
    reference = schema.get("$ref")
    if reference is not None:
        if reference in seen:
            raise ToolSpecError(f"{where}: $ref {reference!r} leads back to itself")
        target = _resolve(reference, root, where)
        _check_value(target, root, f"{where} -> {reference}", (*seen, reference))
    _check_properties(schema, root, where, seen)
    if "items" in schema and isinstance(schema["items"], Mapping):
        _check_value(schema["items"], root, f"{where}.items", seen)
    for key in ("anyOf", "oneOf", "allOf"):
        for index, inner in enumerate(schema.get(key, ())):
            _check_value(inner, root, f"{where}.{key}.{index}", seen)


def _resolve(reference: str, root: Mapping[str, Any], where: str) -> Any:
    if not reference.startswith("#/"):
        raise ToolSpecError(f"{where}: $ref {reference!r} is not local; use '#/$defs/NAME'")
    value: Any = root
    for part in reference[2:].split("/"):
        if not isinstance(value, Mapping) or part not in value:
            raise ToolSpecError(f"{where}: $ref {reference!r} leads nowhere")
        value = value[part]
    return value


class ArgumentValidator:
    """Checks the arguments of calls against a schema; names beyond it are refused."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        closed = {"additionalProperties": False, **parameters}
        self._validator = Draft202012Validator(closed)

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """Return what is wrong with ``arguments``, for the model to read; None if nothing."""
        errors = list(self._validator.iter_errors(arguments))
        if not errors:
            return None
        # What was misspelt is also missing: the name that was given says more.
        for kind in ("additionalProperties", "required"):
            found = next((e for e in errors if e.validator == kind and not e.absolute_path), None)
            if found is not None:
                return explain(found)
        return explain(best_match(errors) or errors[0])
