"""Arguments of calls, checked against the JSON Schema of a tool's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend

from agentrl.tool.explain import explain

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


_Validator = extend(Draft202012Validator, {"pattern": _pattern})


class ArgumentValidator:
    """Checks the arguments of calls against a schema; names beyond it are refused."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        closed = {"additionalProperties": False, **parameters}
        self._validator = _Validator(closed)

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
