from __future__ import annotations

import math

import pytest
import yaml

from agentrl.config.yaml_values import read_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4e-4", 4e-4),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-1.", -1.0),
        ("010", 10),
        ("-7", -7),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("inf", math.inf),
        ("-.inf", -math.inf),
        ("information", "information"),
        ("nano", "nano"),
        ("1.2.3", "1.2.3"),
        ("2026-01-01", "2026-01-01"),
        ("'4e-4'", "4e-4"),
        ("{a: [1, 2e0], b: {c: x}}", {"a": [1, 2.0], "b": {"c": "x"}}),
    ],
)
def test_a_value_is_what_it_looks_like(text: str, value: object) -> None:
    found = read_value(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["nan", ".NaN"])
def test_nan_is_a_number(text: str) -> None:
    assert math.isnan(read_value(text))


@pytest.mark.parametrize("text", ["{a: 1", "!!python/object/apply:os.getcwd []"])
def test_what_is_no_plain_yaml_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        read_value(text)
