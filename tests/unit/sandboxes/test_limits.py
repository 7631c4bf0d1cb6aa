"""A limit that would not limit is refused before a box exists."""

from __future__ import annotations

import math

import pytest
from agentrl_sandboxes.docker import DockerBackend
from agentrl_sandboxes.e2b import E2BBackend
from agentrl_sandboxes.http import HttpBackend
from agentrl_sandboxes.local import LocalBackend
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


@pytest.mark.parametrize(
    ("backend", "argument"),
    [
        (LocalBackend, {"idle_boxes": -1}),
        (LocalBackend, {"total_memory_mb": 0}),
        (LocalBackend, {"total_memory_mb": -1}),
        (DockerBackend, {"idle_boxes": -1}),
        (DockerBackend, {"max_creating": 0}),
        (DockerBackend, {"ttl_s": math.nan}),
        (DockerBackend, {"create_timeout_s": 0}),
        (E2BBackend, {"ttl_s": -1}),
        (E2BBackend, {"create_timeout_s": math.inf}),
        (HttpBackend, {"url": "http://127.0.0.1:1", "create_timeout_s": -1}),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused_before_anything_starts(backend, argument):
    name = list(argument)[-1]
    with pytest.raises(ConfigError, match=rf"sandbox\.kwargs\.{name} must be"):
        backend(**argument)
