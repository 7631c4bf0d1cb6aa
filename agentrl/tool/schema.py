"""Arguments of calls, checked against the JSON Schema of a tool's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from agentrl.tool.explain import explain


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
