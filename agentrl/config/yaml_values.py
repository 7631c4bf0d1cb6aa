"""Values written as YAML on the command line, read as YAML 1.2 has it.

PyYAML reads YAML 1.1, in which ``4e-4`` is text, ``010`` is eight, ``1:30`` is ninety and ``no`` is
false: readings that nobody means.
"""

from __future__ import annotations

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """The core schema of YAML 1.2, without octal and hexadecimal numbers."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


_SCALARS = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", [*"~nN", ""]),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+", [*"-+0123456789"]),
    "tag:yaml.org,2002:float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.?(?:inf|Inf|INF)|\.?(?:nan|NaN|NAN)",
        [*"-+0123456789.iInN"],
    ),
}
for _tag, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"(?:{_pattern})$"), _first)


def _number(text: str) -> int | float:
    """Read ``010`` as ten, and ``inf`` with or without its dot."""
    return int(text) if re.fullmatch(r"[-+]?[0-9]+", text) else float(text.replace(".i", "i"))


def _construct(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    return _number(str(loader.construct_scalar(node)).lower().replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct)


def read_value(text: str) -> Any:
    """Read one value.

    Raises:
        yaml.YAMLError: it is no YAML.
        ValueError, RecursionError: a number of thousands of digits, brackets within brackets.
    """
    return yaml.load(text, Loader=_Loader)
