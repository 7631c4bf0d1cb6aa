"""Arguments written as plain text, typed by the tool's schema: ``5`` where it says integer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.tool.parsers.strict_json import read_json

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_MAX_SCHEMA_DEPTH = 8
_BRANCHES = ("anyOf", "oneOf", "allOf")


@dataclass(slots=True, frozen=True, kw_only=True)
class ParameterTypes:
    """What the parameters of one tool may be."""

    schema: Mapping[str, Any]
    """Of the parameters, an object; empty where the tool is unknown."""
    guess_json: bool = False
    """Take a value for JSON where the schema does not say what it is, and the text is JSON: for
    formats that write all but strings as JSON."""

    def value(self, name: str, text: str) -> Any:
        """Return what ``text`` stands for.

        A value that does not fit its type stays text: the check of the arguments, which follows,
        says so better.

        Raises:
            ValueError: an object or a list that is no JSON; with a message for the model.
        """
        properties = self.schema.get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        types = types_of(schema, self.schema)
        if types:
            return _typed(text, types)
        if not self.guess_json:
            return text
        try:
            value, end = read_json(text.strip())
        except ValueError:
            return text
        return value if end == len(text.strip()) else text


def types_of(schema: Any, root: Mapping[str, Any], depth: int = _MAX_SCHEMA_DEPTH) -> set[str]:
    """Return the JSON types that ``schema`` allows; empty where it does not say."""
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, Sequence):
        return {item for item in declared if isinstance(item, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {_type_of(value) for value in values}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return types_of(_resolve(reference, root), root, depth - 1)
    types: set[str] = set()
    for key in _BRANCHES:
        for branch in schema.get(key) or ():
            types |= types_of(branch, root, depth - 1)
    if not types and "properties" in schema:
        return {"object"}
    if not types and "items" in schema:
        return {"array"}
    return types


def _typed(text: str, types: set[str]) -> Any:
    word = text.strip()
    if types == {"string"} or not word:
        return text
    if "null" in types and word in ("null", "None"):
        return None
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if not types.isdisjoint(("integer", "number")) and (number := _NUMBER.fullmatch(word)):
        return _number(word, number, types)
    if not types.isdisjoint(("object", "array")) and word[0] in "{[":
        try:
            value, end = read_json(word)
            if end == len(word):
                return value
            raise ValueError("text follows it")
        except ValueError:
            if "string" not in types:
                raise
    return text


def _number(word: str, number: re.Match[str], types: set[str]) -> int | float:
    value, _ = read_json(word)
    is_whole = isinstance(value, float) and value.is_integer() and number[1] is None
    return int(value) if is_whole and "number" not in types else value


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {
        str: "string",
        int: "integer",
        float: "number",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return names.get(type(value), "string")


def _resolve(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        return None
    for part in reference[1:].split("/")[1:]:
        if not isinstance(root, Mapping):
            return None
        root = root.get(part.replace("~1", "/").replace("~0", "~"))
    return root
