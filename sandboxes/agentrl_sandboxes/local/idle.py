"""Boxes forked ahead of need, for the limits asked for last."""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import astuple, dataclass, field

from agentrl.errors import SandboxError
from agentrl.sandbox.base import SandboxLimits
from agentrl_sandboxes.supervised.box import SupervisedSandbox

_MAX_KINDS = 3


@dataclass(slots=True, kw_only=True)
class _Kind:
    """The boxes held ready for one set of limits."""

    limits: SandboxLimits
    boxes: deque[SupervisedSandbox] = field(default_factory=deque)


class IdleBoxes:
    """Holds a few boxes ready for each of the last sets of limits (tools and graders differ).

    Args:
        open_box: opens one; its :class:`SandboxError` ends a refill, and shows again where a box
            is asked for.
        target: boxes per set of limits; none are held if 0.
    """

    def __init__(
        self, open_box: Callable[[SandboxLimits], Awaitable[SupervisedSandbox]], target: int
    ) -> None:
        self._open_box = open_box
        self._target = target
        self._kinds: OrderedDict[tuple[object, ...], _Kind] = OrderedDict()  # the latest is last
        self._refill: asyncio.Task[None] | None = None
        self._dropping: set[asyncio.Task[None]] = set()
        self._closed = False

    def take(self, limits: SandboxLimits) -> SupervisedSandbox | None:
        """Return a living box of these limits if one is ready, and see to its replacement."""
        if self._target == 0 or self._closed:
            return None
        key = astuple(limits)
        kind = self._kinds.setdefault(key, _Kind(limits=copy.copy(limits)))
        self._kinds.move_to_end(key)
        if self._refill is None or self._refill.done():
            self._refill = asyncio.create_task(self._fill())
        while kind.boxes:
            box = kind.boxes.popleft()
            if not box.ended:
                return box
            self._drop(box)
        return None

    async def close(self) -> None:
        """Stop refilling; the boxes themselves are the backend's to close. Idempotent."""
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.gather(self._refill, return_exceptions=True)
        await asyncio.gather(*self._dropping, return_exceptions=True)
        self._kinds.clear()

    async def _fill(self) -> None:
        while len(self._kinds) > _MAX_KINDS:
            for box in self._kinds.popitem(last=False)[1].boxes:
                self._drop(box)
        for kind in reversed(list(self._kinds.values())):
            while len(kind.boxes) < self._target:
                try:
                    kind.boxes.append(await self._open_box(kind.limits))
                except SandboxError:
                    return

    def _drop(self, box: SupervisedSandbox) -> None:
        """Close a box without waiting for it here."""
        task = asyncio.ensure_future(box.close())
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)
