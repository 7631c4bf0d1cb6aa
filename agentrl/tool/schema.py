"""Arguments of calls, checked against the JSON Schema of a tool's parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend

from agentrl.tool.explain import explain
from agentrl.tool.parsers.strict_json import MAX_DEPTH, is_deeper

_MAX_STEPS = 20_000
"""References followed for one call: less than a second of the event loop."""
_TOO_MUCH = "the arguments are too long or nested too deeply to be checked; give less at once"
_plain_ref: Any = Draft202012Validator.VALIDATORS["$ref"]
_PATTERN_TIMEOUT_S = 0.1
"""A pattern of a careless author can take for ever on what a model writes."""


def _pattern(
    validator: Any, pattern: str, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "string"):
        return
    try:
        if regex.search(pattern, instance, timeout=_PATTERN_TIMEOUT_S) is None:
            yield ValidationError(f"{instance!r} does not match {pattern!r}")
    except TimeoutError:
        yield ValidationError(f"{instance!r} takes too long to compare with {pattern!r}")


def _unique(
    validator: Any, wanted: bool, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    """Compare by a canonical form: the library compares items that have no order pair by pair."""
    if wanted and validator.is_type(instance, "array"):
        forms = {json.dumps(_canonical(item), sort_keys=True) for item in instance}
        if len(forms) < len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class _TooManySteps(Exception):
    """A recursive schema can try exponentially many ways to read a deep value."""


class ArgumentValidator:
    """Checks the arguments of calls against a schema; names beyond it are refused.

    Used from one thread: calls are checked in the event loop, so checking is bounded.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        closed = {"additionalProperties": False, **parameters}
        self._num_steps = 0
        keywords = {"pattern": _pattern, "uniqueItems": _unique, "$ref": self._follow}
        self._validator = extend(Draft202012Validator, keywords)(closed)

    def _follow(
        self, validator: Any, reference: str, instance: Any, schema: Mapping[str, Any]
    ) -> Iterator[ValidationError]:
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise _TooManySteps
        yield from _plain_ref(validator, reference, instance, schema)

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """Return what is wrong with ``arguments``, for the model to read; None if nothing."""
        if is_deeper(arguments, MAX_DEPTH):  # parsers read none; others hand over what they have
            return _TOO_MUCH
        self._num_steps = 0
        try:
            return self._explained(arguments)
        except (RecursionError, _TooManySteps):
            return _TOO_MUCH
        except (ArithmeticError, ValueError):  # of a number that has no quotient
            return "the arguments hold a number that is too large to be checked, or is none"

    def _explained(self, arguments: Mapping[str, Any]) -> str | None:
        errors = list(self._validator.iter_errors(arguments))
        if not errors:
            return None
        # What was misspelt is also missing: the name that was given says more.
        for kind in ("additionalProperties", "required"):
            found = next((e for e in errors if e.validator == kind and not e.absolute_path), None)
            if found is not None:
                return explain(found)
        return explain(best_match(errors) or errors[0])
