"""What a call to a rollout worker's actor raises here; no cluster is needed to tell."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest
from ray import exceptions as ray_exceptions

from agentrl.dist.ray_rollout import RayRolloutHandle
from agentrl.errors import AgentRLError, EngineError, WorkerError

pytestmark = pytest.mark.timeout(60)


class Raising:
    """An actor whose every call ends with what Ray makes of an error of the worker."""

    def __init__(self, cause: Exception) -> None:
        error = ray_exceptions.RayTaskError("f", "File worker.py", cause, pid=1, ip="127.0.0.1")
        self._error = error.as_instanceof_cause()

    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *args: Any) -> Any:
        return self

    def future(self) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_exception(self._error)
        return done


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(EngineError("port 9 is taken"), EngineError), (ValueError("odd"), WorkerError)],
)
def test_errors_of_a_worker_arrive_with_its_words_and_its_traceback(
    cause: Exception, kind: type[AgentRLError]
) -> None:
    handle = RayRolloutHandle(Raising(cause), index=3)
    with pytest.raises(kind) as raised:
        asyncio.run(handle.start())
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert str(cause) in said or kind is WorkerError
    assert "rollout worker 3" in said and "File worker.py" in said
