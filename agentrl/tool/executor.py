"""Runs the tool calls of one trajectory: opens lazily, limits every call, closes always."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from agentrl.errors import (
    InfrastructureError,
    RewardError,
    SandboxError,
    SandboxUnavailable,
    ToolError,
)
from agentrl.finite import check_reward
from agentrl.tool.base import Tool, ToolContext, ToolReply
from agentrl.tool.binding import Binding, Toolbox
from agentrl.tool.deadline import DeadlinePassed, within
from agentrl.types import ToolCall, ToolResult, ToolStatus

logger = logging.getLogger(__name__)

Cut = Callable[[str, int], tuple[str, int]]
"""``(text, max_tokens) -> (prefix, tokens cut)``; bounded in time whatever the length."""

_INFRASTRUCTURE = (SandboxError, InfrastructureError, ConnectionError)
_FIRST_PAUSE_S = 0.1


class ToolExecutor:
    """The tools of one trajectory.

    Args:
        toolbox: the tools, shared.
        make_context: gives what a tool is opened with; awaited once per tool that is called. What
            it raises goes through :meth:`run`.
        cut: shortens answers, counting in tokens.
        seed: of the trajectory; decides the pauses between retries.
        num_calls: calls by tool that were made before, in the part of an episode that a branch
            inherits; they count for ``max_calls``.
        open_timeout_s, close_timeout_s: deadlines of ``Tool.open`` and ``Tool.close``.
    """

    def __init__(
        self,
        toolbox: Toolbox,
        *,
        make_context: Callable[[str], Awaitable[ToolContext]],
        cut: Cut,
        seed: int = 0,
        num_calls: Mapping[str, int] | None = None,
        open_timeout_s: float = 30.0,
        close_timeout_s: float = 5.0,
    ) -> None:
        self._toolbox = toolbox
        self._make_context = make_context
        self._cut = cut
        self._random = random.Random(seed)
        self._open_timeout_s = open_timeout_s
        self._close_timeout_s = close_timeout_s
        self._open: dict[str, Tool] = {}
        self.num_calls: Counter[str] = Counter(num_calls)
        """Calls so far, by tool, those that were refused included."""
        self._closed = False
        self.failure: BaseException | None = None
        """What our side failed with, where an answer has the status ``INFRA_ERROR``."""

    async def run(self, call: ToolCall) -> ToolResult:
        """Answer one call. What goes wrong is in the status; see :class:`ToolStatus`."""
        start = time.perf_counter()
        binding = self._toolbox.bindings.get(call.name)
        content, status, reward = await self._answer(call, binding)
        num_cut = 0
        if binding is not None:
            content, num_cut = self._cut(content, binding.spec.limits.max_output_tokens)
            if num_cut:
                content += f"\n[cut: {num_cut} more tokens]"
        return ToolResult(
            name="unknown" if binding is None else call.name,
            content=content,
            status=status,
            duration_s=time.perf_counter() - start,
            truncated_tokens=num_cut,
            reward=reward,
        )

    async def close(self) -> None:
        """Close every tool that was opened. Never raises for what a tool does; idempotent."""
        self._closed = True
        opened, self._open = self._open, {}
        if opened:
            await asyncio.gather(*(self._close_one(*item) for item in opened.items()))

    # ------------------------------------------------------------------ one call

    async def _answer(
        self, call: ToolCall, binding: Binding | None
    ) -> tuple[str, ToolStatus, float]:
        """Return text, status, and what the tool paid: nothing but where it answered."""
        refusal = self._refuse(call, binding)
        if binding is None or refusal is not None:
            return f"error: {refusal}", ToolStatus.ERROR, 0.0
        limits = binding.spec.limits
        async with binding.slots:
            for attempt in range(limits.retries + 1):
                tool = self._open.get(call.name)
                if tool is None:
                    context = await self._make_context(call.name)
                    try:
                        tool = await self._open_one(binding, context)
                    except SandboxUnavailable:  # so it would be for every episode: stop the run
                        raise
                    except Exception as error:  # opening does not depend on the model
                        self.failure = error
                        text = f"opening the tool failed: {_named(error)}"
                        return text, ToolStatus.INFRA_ERROR, 0.0
                try:
                    value = await self._invoke(tool.call, call.arguments, limits.timeout_s)
                    content, reward = _paid(value, call.name)
                    return content, ToolStatus.OK, reward
                except _INFRASTRUCTURE as error:
                    if attempt == limits.retries:
                        self.failure = error
                        return _named(error), ToolStatus.INFRA_ERROR, 0.0
                    pause_s = _FIRST_PAUSE_S * 2**attempt * (0.5 + self._random.random())
                    await asyncio.sleep(pause_s)
                except RewardError as error:  # the tool's bug: again it would pay the same
                    self.failure = error
                    return _named(error), ToolStatus.INFRA_ERROR, 0.0
                except DeadlinePassed:
                    note = self._give_up(call.name, tool)
                    text = f"error: timed out after {limits.timeout_s:g} s{note}"
                    return text, ToolStatus.TIMEOUT, 0.0
                except ToolError as error:
                    return f"error: {error}", ToolStatus.ERROR, 0.0
                except Exception as error:
                    # Nothing of ours witnesses a failure: a model must not be able to leave its
                    # group's baseline by crashing a tool.
                    logger.warning("tool %s raised %s", call.name, _named(error))
                    return f"error: {_named(error)}", ToolStatus.ERROR, 0.0
        raise AssertionError("every attempt returns or is followed by another")

    def _refuse(self, call: ToolCall, binding: Binding | None) -> str | None:
        """Return why nothing runs, for the model to read."""
        if self._closed:
            return "the tools are closed"
        if call.error is not None:
            return call.error
        if binding is None:
            known = ", ".join(self._toolbox.bindings) or "none"
            return f"unknown tool {call.name[:64]!r}; the tools are: {known}"
        self.num_calls[call.name] += 1
        limits = binding.spec.limits
        if self.num_calls[call.name] > limits.max_calls:
            return f"{call.name} may be called {limits.max_calls} times, and was"
        return binding.validator.problem(call.arguments)

    async def _invoke(
        self, method: Callable[..., Any], arguments: dict[str, Any], timeout_s: float
    ) -> Any:
        if inspect.iscoroutinefunction(method):
            return await within(method(**arguments), timeout_s)
        value = await self._toolbox.off_loop.run(lambda: method(**arguments), timeout_s)
        if inspect.iscoroutine(value):
            return await within(value, timeout_s)
        return value

    def _give_up(self, name: str, tool: Tool) -> str:
        """Replace a tool whose thread hangs: two threads in one instance would be a race."""
        if inspect.iscoroutinefunction(tool.call):
            return ""
        del self._open[name]
        closing = asyncio.ensure_future(self._close_one(name, tool))
        _background.add(closing)
        closing.add_done_callback(_background.discard)
        return "; its state is lost"

    # ------------------------------------------------------------------ opening, closing

    async def _open_one(self, binding: Binding, context: ToolContext) -> Tool:
        tool = binding.make()
        # Noted before it is open: an open that is cancelled half-way is closed all the same.
        self._open[binding.spec.name] = tool
        try:
            await self._invoke(tool.open, {"context": context}, self._open_timeout_s)
        except Exception:
            self._open.pop(binding.spec.name, None)
            await self._close_one(binding.spec.name, tool)
            raise
        return tool

    async def _close_one(self, name: str, tool: Tool) -> None:
        try:
            await self._invoke(tool.close, {}, self._close_timeout_s)
        except Exception as error:
            logger.warning("closing tool %s failed: %s", name, _named(error))


_background: set[asyncio.Future[None]] = set()
"""The event loop holds tasks weakly; this keeps closings alive until they are done."""


def _paid(value: Any, name: str) -> tuple[str, float]:
    if not isinstance(value, ToolReply):
        return _as_text(value), 0.0
    return _as_text(value.content), check_reward(value.reward, where=f"tool {name!r}")


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, (bool, int, float)):
        return str(value)
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=str)
    raise InfrastructureError(
        f"the tool returned {type(value).__name__}; a tool returns text, a number, or JSON values"
    )


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
