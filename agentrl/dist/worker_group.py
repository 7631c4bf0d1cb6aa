"""A group of workers that is called as one; here the one that lives in the caller's process."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from agentrl.batch import Batch, RowView
from agentrl.dist.dispatch import Call, Handle, Layout, Shard
from agentrl.dist.ranks import Ranks
from agentrl.dist.worker import Worker, call_spec, in_words
from agentrl.errors import AgentRLError, WorkerError


class WorkerGroup(Protocol):
    """Calls the registered methods of its workers, on all ranks that a method's dispatch names.

    The first failure ends the group: later calls raise it again. Nothing is ever called twice.
    """

    @property
    def world_size(self) -> int:
        """Ranks."""
        ...

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method and return what its dispatch makes of the results.

        Raises:
            AgentRLError: a rank raised it; its cause says which rank, and holds the traceback.
            WorkerError: a rank raised another error, in its words.
            WorkerLost: the process of a rank is gone.
            WorkerTimeout: a rank passed the method's deadline.
        """
        ...

    def keep(self, method: str, /, *args: Any, **kwargs: Any) -> list[Handle]:
        """Call as :meth:`call`, but leave the results where they are.

        Returns:
            One handle per rank that was called, to be passed to a call of this group or another.
        """
        ...

    def put(self, value: Any) -> Handle:
        """Move a value to where ranks read it, once for several calls."""
        ...

    def shutdown(self) -> None:
        """End the workers. Idempotent; later calls raise WorkerError."""
        ...


class LocalWorkerGroup:
    """One rank, in the caller's process and thread: what a debugger sees is the whole run.

    It has no deadlines, since there is no other rank to wait for.

    Args:
        worker_class: of the worker.
        args: its arguments after ``ranks``, as are ``kwargs``.
        device: on which it computes.
    """

    def __init__(
        self,
        worker_class: type[Worker],
        *args: Any,
        device: str | torch.device = "cpu",
        **kwargs: Any,
    ) -> None:
        self._worker_class = worker_class
        self._worker: Worker | None = worker_class(Ranks.single(device), *args, **kwargs)
        self._layout = Layout(1, lambda mesh: [0])
        self._ended: str | None = None

    @property
    def world_size(self) -> int:
        """1."""
        return 1

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`WorkerGroup.call`; errors of the worker come as they are."""
        dispatch = call_spec(self._worker_class, method).dispatch
        calls = dispatch.split(Call(args, kwargs), self._layout)
        results = [self._run(method, call) for call in calls]
        return dispatch.collect(results, calls, self._layout)

    def keep(self, method: str, /, *args: Any, **kwargs: Any) -> list[Handle]:
        """See :meth:`WorkerGroup.keep`."""
        dispatch = call_spec(self._worker_class, method).dispatch
        calls = dispatch.split(Call(args, kwargs), self._layout)
        return [self.put(self._run(method, call)) for call in calls if call is not None]

    def put(self, value: Any) -> Handle:
        """See :meth:`WorkerGroup.put`; nothing moves."""
        return Handle(value, value.cu_seqlens if isinstance(value, Batch) else None)

    def shutdown(self) -> None:
        """Drop the worker."""
        self._worker = None
        self._ended = self._ended or "it was shut down"

    def _run(self, method: str, call: Call | None) -> Any:
        if call is None:
            return None
        if self._worker is None:
            raise WorkerError(f"{method}: the group has ended: {self._ended}")
        own = call.map(_arrived)
        try:
            return getattr(self._worker, method)(*own.args, **own.kwargs)
        except Exception as error:
            self._worker = None
            self._ended = f"{method} raised {in_words(error)}"
            if not isinstance(error, AgentRLError):
                error.add_note(f"raised by {self._worker_class.__name__}.{method}, rank 0 of 1")
            raise


def _arrived(value: Any) -> Any:
    """Return an argument as a worker sees it."""
    if isinstance(value, Shard):
        return RowView(_arrived(value.source), value.rows)
    return value.reference if isinstance(value, Handle) else value
