"""The fixture that runs a test against every sandbox backend; also finds the modules beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # under any import mode of pytest

from sandbox_arms import ARMS, ArmUnavailable, StartedBackend, started


@pytest.fixture(scope="module", params=list(ARMS))
def backend(request: pytest.FixtureRequest) -> Iterator[StartedBackend]:
    """Each backend in turn, started once for a test file."""
    try:
        with started(request.param) as arm:
            yield arm
    except ArmUnavailable as reason:
        pytest.skip(f"sandbox backend {request.param} cannot run here: {reason}")
