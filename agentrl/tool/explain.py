"""What is wrong with the arguments of a call, in one sentence that a model can act upon."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jsonschema.exceptions import ValidationError

_MAX_SHOWN = 80
"""Characters of a value that a sentence repeats."""
_MAX_LISTED = 20
"""Names or choices that a sentence lists."""
_MAX_MESSAGE = 200

_KINDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}
_TYPES = {
    "boolean": "a boolean",
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def explain(error: ValidationError) -> str:
    """Return a sentence that names the argument, what it must be, and what was got."""
    explainer = _EXPLAINERS.get(str(error.validator))
    if explainer is not None:
        return explainer(error)
    message = error.message
    if len(message) > _MAX_MESSAGE:
        message = f"{message[:_MAX_MESSAGE]}..."
    return f"{_subject(error)}: {message}"


def _subject(error: ValidationError) -> str:
    path = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path
    )
    return f"argument {_cut(path[1:])!r}" if path else "the arguments"


def _unknown(error: ValidationError) -> str:
    known = list(_mapping(error.schema).get("properties", {}))
    extra = [name for name in _mapping(error.instance) if name not in known]
    hints = []
    for name in extra[:_MAX_LISTED]:
        close = difflib.get_close_matches(name.lower(), [n.lower() for n in known], n=1)
        near = next((n for n in known if close and n.lower() == close[0]), None)
        hints.append(f"{_cut(name)!r}" + (f" (did you mean {near!r}?)" if near else ""))
    where = f" in {_subject(error)}" if error.absolute_path else ""
    plural = "s" if len(extra) > 1 else ""
    return f"unknown argument{plural} {', '.join(hints)}{where}; {_takes(known, error)}"


def _missing(error: ValidationError) -> str:
    schema = _mapping(error.schema)
    names = [name for name in schema.get("required", ()) if name not in _mapping(error.instance)]
    where = f" in {_subject(error)}" if error.absolute_path else ""
    plural = "s" if len(names) > 1 else ""
    wanted = ", ".join(_with_type(name, schema) for name in names[:_MAX_LISTED])
    got = (
        ", ".join(_cut(name) for name in list(_mapping(error.instance))[:_MAX_LISTED]) or "nothing"
    )
    return f"missing argument{plural} {wanted}{where}; got {got}"


def _type(error: ValidationError) -> str:
    wanted = _either(_type_names(error.validator_value))
    return f"{_subject(error)} must be {wanted}, got {_got(error.instance)}"


def _choice(error: ValidationError) -> str:
    choices: Any = error.validator_value
    listed = [_json(value) for value in list(choices)[:_MAX_LISTED]]
    rest = f" and {len(choices) - _MAX_LISTED} more" if len(choices) > _MAX_LISTED else ""
    texts = [value for value in choices if isinstance(value, str)]
    near = difflib.get_close_matches(str(error.instance)[:_MAX_SHOWN], texts, n=1)
    hint = f" (did you mean {_json(near[0])}?)" if near else ""
    return (
        f"{_subject(error)} must be one of {', '.join(listed)}{rest}, got "
        f"{_got(error.instance)}{hint}"
    )


def _constant(error: ValidationError) -> str:
    return f"{_subject(error)} must be {_json(error.validator_value)}, got {_got(error.instance)}"


def _alternatives(error: ValidationError) -> str:
    kinds = _type_names([_mapping(option).get("type") for option in _list(error.validator_value)])
    if len(kinds) != len(_list(error.validator_value)) or type(error.instance) in (list, dict):
        inner = max(error.context or [], key=lambda e: len(e.absolute_path), default=None)
        if inner is not None:
            return explain(inner)
    return f"{_subject(error)} must be {_either(kinds)}, got {_got(error.instance)}"


def _bound(words: str) -> Callable[[ValidationError], str]:
    def text(error: ValidationError) -> str:
        return f"{_subject(error)} must {words.format(error.validator_value)}, got " + _got(
            error.instance
        )

    return text


_EXPLAINERS: dict[str, Callable[[ValidationError], str]] = {
    "additionalProperties": _unknown,
    "required": _missing,
    "type": _type,
    "enum": _choice,
    "const": _constant,
    "anyOf": _alternatives,
    "oneOf": _alternatives,
    "minimum": _bound("be at least {}"),
    "maximum": _bound("be at most {}"),
    "exclusiveMinimum": _bound("be more than {}"),
    "exclusiveMaximum": _bound("be less than {}"),
    "multipleOf": _bound("be a multiple of {}"),
    "minLength": _bound("have at least {} characters"),
    "maxLength": _bound("have at most {} characters"),
    "minItems": _bound("have at least {} items"),
    "maxItems": _bound("have at most {} items"),
    "pattern": _bound("match the regular expression {!r}"),
}


def _takes(known: Sequence[str], error: ValidationError) -> str:
    if not known:
        return "it takes none"
    schema = _mapping(error.schema)
    listed = ", ".join(_with_type(name, schema) for name in known[:_MAX_LISTED])
    return f"it takes {listed}" + (", ..." if len(known) > _MAX_LISTED else "")


def _with_type(name: str, schema: Mapping[str, Any]) -> str:
    declared = _mapping(schema.get("properties", {}).get(name))
    optional = "" if name in schema.get("required", ()) else ", optional"
    return f"{name!r} ({_declared(declared)}{optional})"


def _declared(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return _either(_json(choice) for choice in schema["enum"][:_MAX_LISTED])
    options = _list(schema.get("anyOf")) or _list(schema.get("oneOf"))
    kinds = _type_names([_mapping(option).get("type") for option in options])
    kinds = kinds or _type_names(schema.get("type"))
    return _either(kinds) if kinds else "any"


def _type_names(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [_TYPES[item] for item in values if isinstance(item, str) and item in _TYPES]


def _either(words: Iterable[str]) -> str:
    words = list(words) or ["of another type"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _got(value: Any) -> str:
    kind = _KINDS.get(type(value), type(value).__name__)
    return "null" if value is None else f"{kind}: {_json(value)}"


def _json(value: Any) -> str:
    # A slice first: a model can write a megabyte where a number belongs.
    if isinstance(value, str):
        value = value[: _MAX_SHOWN + 1]
    if isinstance(value, list):
        value = value[:_MAX_LISTED]
    return _cut(json.dumps(value, ensure_ascii=False, default=str))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
