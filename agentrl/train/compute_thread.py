"""Where the driver computes: one thread, so that its event loop goes on meanwhile.

Episodes, deadlines and engines that live in this process are served by the event loop while a step
is assembled, credited and trained on. One thread does all of it, in order, since settings of torch
belong to a thread: the first work takes over the caller's number of threads and CUDA device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs one piece of work at a time."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what ``work`` returns, computed in the thread.

        A caller that is cancelled is held until the work has ended: what it changes, such as the
        weights of an engine, must not be taken from under it.
        """
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(self._executor(), lambda: work(*args, **kwargs))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait([working])
            raise

    def _executor(self) -> ThreadPoolExecutor:
        if self._pool is None:
            num_threads = torch.get_num_threads()
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

            def as_the_caller() -> None:
                torch.set_num_threads(num_threads)
                if device is not None:
                    torch.cuda.set_device(device)

            self._pool = ThreadPoolExecutor(1, "compute", initializer=as_the_caller)
        return self._pool

    def close(self) -> None:
        """End the thread, once its work has ended. Idempotent."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
