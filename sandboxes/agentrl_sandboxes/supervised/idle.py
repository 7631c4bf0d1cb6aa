"""Boxes made ahead of need, for the limits asked for last."""

from __future__ import annotations

import asyncio
import contextlib
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
        is_fresh: whether a box that was held may still be handed out.
        at_once: boxes of one kind that may be opened at once, where that is mostly waiting.
    """

    def __init__(
        self,
        open_box: Callable[[SandboxLimits], Awaitable[SupervisedSandbox]],
        target: int,
        *,
        is_fresh: Callable[[SupervisedSandbox], bool] = lambda _: True,
        at_once: int = 1,
    ) -> None:
        self._open_box = open_box
        self._target = target
        self._is_fresh = is_fresh
        self._at_once = at_once
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
            if not box.ended and self._is_fresh(box):
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
            while (missing := self._target - len(kind.boxes)) > 0:
                opened = await asyncio.gather(
                    *(self._open_into(kind) for _ in range(min(missing, self._at_once)))
                )
                if not all(opened):
                    return

    async def _open_into(self, kind: _Kind) -> bool:
        try:
            kind.boxes.append(await self._open_box(kind.limits))
        except SandboxError:
            return False
        return True

    def _drop(self, box: SupervisedSandbox) -> None:
        """Close a box without waiting for it here."""
        task = asyncio.ensure_future(_close_quietly(box))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)


async def _close_quietly(box: SupervisedSandbox) -> None:
    with contextlib.suppress(SandboxError):  # nobody waits for it; the backend counts it
        await box.close()
