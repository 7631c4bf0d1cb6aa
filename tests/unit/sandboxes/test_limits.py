"""A limit that would not limit is refused before a box exists."""

from __future__ import annotations

import math

import pytest
from agentrl_sandboxes.supervised.limits import check_limits

from agentrl.errors import ConfigError
from agentrl.sandbox.base import SandboxLimits


def test_the_defaults_are_fine():
    check_limits(SandboxLimits())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("disk_mb", 0),
        ("disk_mb", -1),
        ("memory_mb", 8),
        ("memory_mb", 64.5),
        ("memory_mb", True),
        ("max_processes", 0),
        ("output_bytes", 0),
        ("output_bytes", 2**40),
        ("wall_s", 0),
        ("wall_s", math.inf),
        ("cpu_s", math.nan),
        ("cpu_s", "5"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name}.*got"):
        check_limits(SandboxLimits(**{name: value}))
