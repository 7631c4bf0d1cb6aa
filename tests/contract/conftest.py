"""The fixture that runs a test against every sandbox backend; also finds the modules beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # under any import mode of pytest

from abuse_arena import Arena
from sandbox_arms import (
    ARMS,
    UNTIL_TESTS_END,
    ArmUnavailable,
    StartedBackend,
    cannot_run,
    started,
)


@pytest.fixture(scope="session", autouse=True)
def _shared_by_files() -> Iterator[None]:
    """Ends what files share after the last one."""
    with UNTIL_TESTS_END:
        yield


@pytest.fixture(scope="module", params=list(ARMS))
def backend(request: pytest.FixtureRequest) -> Iterator[StartedBackend]:
    """Each backend in turn, started once for a test file."""
    try:
        with started(request.param) as arm:
            yield arm
    except ArmUnavailable as reason:
        cannot_run(f"sandbox backend {request.param}", reason)


@pytest.fixture(scope="module")
def settled_arena(backend: StartedBackend) -> Arena:
    """A backend with its reserve of boxes, and how the host looks with that."""
    return Arena(backend)


@pytest.fixture
def arena(settled_arena: Arena) -> Iterator[Arena]:
    """A backend under attack; the host must look after the test as it did before."""
    yield settled_arena
    settled_arena.check_host()
