"""Runs the tool calls of one trajectory: opens lazily, limits every call, closes always."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from agentrl.errors import (
    AgentRLError,
    InfrastructureError,
    RewardError,
    SandboxError,
    SandboxUnavailable,
    ToolError,
)
from agentrl.tool.answer import Answer, answer_of, named
from agentrl.tool.base import Tool, ToolContext
from agentrl.tool.binding import Binding, Toolbox
from agentrl.tool.breaker import CircuitOpen
from agentrl.tool.deadline import DeadlinePassed, contained, contained_call, within
from agentrl.tool.watchdog import TASK_PREFIX, watch_running_loop
from agentrl.types import ToolCall, ToolResult, ToolStatus

logger = logging.getLogger(__name__)

Cut = Callable[[str, int], tuple[str, int]]
"""``(text, max_tokens) -> (prefix, tokens cut)``; bounded in time whatever the length."""

_INFRASTRUCTURE = (SandboxError, InfrastructureError, ConnectionError)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_MAX_FAILURE_CHARS = 2000
"""Of a failure of ours, which the record keeps and no model is shown."""
_MAX_TOKEN_CHARS = 64
"""Characters per token up to which an answer that is no text is written out."""


class ToolExecutor:
    """The tools of one trajectory.

    Calls of one turn run at the same time where their tools let them: functions do. The others,
    which keep state, alone or in a workspace that they share, run one after the other in the order
    of the turn.

    Args:
        toolbox: the tools, shared.
        make_context: gives what a tool is opened with; awaited once per tool that is called. What
            it raises goes through :meth:`run`.
        cut: shortens answers, counting in tokens.
        cut_note: follows an answer that was cut, with the number in place of ``{}``.
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
        cut_note: str = "\n[cut: {} more tokens]",
        seed: int = 0,
        num_calls: Mapping[str, int] | None = None,
        open_timeout_s: float = 30.0,
        close_timeout_s: float = 5.0,
    ) -> None:
        self._toolbox = toolbox
        self._make_context = make_context
        self._cut = cut
        self._cut_note = cut_note
        self._random = random.Random(seed)
        self._open_timeout_s = open_timeout_s
        self._close_timeout_s = close_timeout_s
        self._open: dict[str, Tool] = {}
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._in_order = asyncio.Lock()
        """Held by a call whose tool does not let calls overlap; first come, first served."""
        self._closings: set[asyncio.Future[None]] = set()
        self.num_calls: Counter[str] = Counter(num_calls)
        """Calls so far, by tool, those that were refused included."""
        self._closed = False
        self.failure: BaseException | None = None
        """What our side failed with, where an answer has the status ``INFRA_ERROR``."""

    async def run(self, call: ToolCall, *, timeout_s: float | None = None) -> ToolResult:
        """Answer one call. What goes wrong is in the status; see :class:`ToolStatus`.

        Args:
            timeout_s: the deadline of this call, where it is nearer than the tool's.

        Raises:
            SandboxUnavailable, ToolUnavailable: no episode could go on: the run must stop.
        """
        return await self._result(call, self._refuse(call), timeout_s)

    async def run_turn(self, calls: Sequence[ToolCall], results: list[ToolResult]) -> None:
        """Answer the calls of one turn.

        Args:
            results: gets the answers in the order of the calls, as far as they are there, also
                where this is cancelled. The first infrastructure failure is the last: the others
                are cancelled, since the trajectory is lost.

        Raises:
            SandboxUnavailable, ToolUnavailable: no episode could go on: the run must stop.
        """
        refusals = [self._refuse(call) for call in calls]  # counted in order, before any runs
        tasks = [
            asyncio.ensure_future(self._result(call, refusal))
            for call, refusal in zip(calls, refusals, strict=True)
        ]
        num_before = len(results)
        try:
            for task in tasks:
                results.append(await task)
                if results[-1].status is ToolStatus.INFRA_ERROR:
                    break
        except BaseException:
            for task in tasks[len(results) - num_before :]:
                if not task.done() or task.cancelled() or task.exception() is not None:
                    break
                results.append(task.result())
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def open(self, name: str) -> str | None:
        """Open a tool ahead of its first call.

        Returns:
            Why it cannot be opened, where that is our side's failure; None where it is open.

        Raises:
            SandboxUnavailable: no episode could go on.
        """
        try:
            await self._opened(self._toolbox.bindings[name])
        except _OpenFailed as error:
            return named(error.__cause__ or error)
        return None

    async def close(self) -> None:
        """Close every tool that was opened. Never raises for what a tool does; idempotent.

        Where the caller is cancelled the tools are closed all the same, and the next call waits for
        it.
        """
        self._closed = True
        for name in list(self._open):
            self._close_soon(name, self._open.pop(name))
        if self._closings:
            await asyncio.wait(self._closings)  # each within close_timeout_s from when it began

    # ------------------------------------------------------------------ one call

    async def _result(
        self, call: ToolCall, refusal: str | None, timeout_s: float | None = None
    ) -> ToolResult:
        start = time.perf_counter()
        binding = self._toolbox.bindings.get(call.name)
        if binding is None or refusal is not None:
            answer = Answer(content=f"error: {refusal}", status=ToolStatus.ERROR)
        else:
            timeout_s = min(
                timeout_s or binding.spec.limits.timeout_s, binding.spec.limits.timeout_s
            )
            async with nullcontext() if binding.overlaps else self._in_order:
                answer = await self._answer(call, binding, timeout_s)
        if answer.status is ToolStatus.INFRA_ERROR:
            self.failure = self.failure or answer.failure
        content, num_cut = answer.content[:_MAX_FAILURE_CHARS], 0
        if binding is not None and answer.status is not ToolStatus.INFRA_ERROR:
            content, num_cut = self._shorten(answer, binding.spec.limits.max_output_tokens)
        return ToolResult(
            name="unknown" if binding is None else call.name,
            content=content,
            status=answer.status,
            duration_s=time.perf_counter() - start,
            truncated_tokens=num_cut,
            reward=answer.reward,
            retries=answer.retries,
            breaker_open=answer.breaker_open,
            cut_short=answer.cut_short,
        )

    def _refuse(self, call: ToolCall) -> str | None:
        """Return why nothing runs, for the model to read."""
        if self._closed:
            return "the tools are closed"
        if call.error is not None:
            return call.error
        binding = self._toolbox.bindings.get(call.name)
        if binding is None:
            known = ", ".join(self._toolbox.bindings) or "none"
            return f"unknown tool {call.name[:64]!r}; the tools are: {known}"
        self.num_calls[call.name] += 1
        limits = binding.spec.limits
        if self.num_calls[call.name] > limits.max_calls:
            return f"{call.name} may be called {limits.max_calls} times, and was"
        return binding.validator.problem(call.arguments)

    def _shorten(self, answer: Answer, max_tokens: int) -> tuple[str, int]:
        """Return text of at most ``max_tokens`` tokens and a note, and how many were cut."""
        content, num_cut = self._cut(answer.content, max_tokens)
        if answer.cut_chars and answer.content:
            chars_per_token = max(1, len(content)) / max_tokens
            num_cut += max(1, round(answer.cut_chars / max(1.0, chars_per_token)))
        return content + self._cut_note.format(num_cut) if num_cut else content, num_cut

    async def _answer(self, call: ToolCall, binding: Binding, timeout_s: float) -> Answer:
        """Call, and call again after infrastructure failures, as often as the tool allows."""
        retries = binding.spec.limits.retries
        for attempt in range(retries + 1):
            async with binding.slots:
                try:
                    is_probe = binding.breaker.admit()
                except CircuitOpen as error:
                    return Answer(
                        content=named(error),
                        status=ToolStatus.INFRA_ERROR,
                        failure=error,
                        retries=attempt,
                        breaker_open=True,
                    )
                answer = await self._watched(call, binding, timeout_s, is_probe)
            answer.retries = attempt
            if not isinstance(answer.failure, _INFRASTRUCTURE) or attempt == retries:
                return answer
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt)
            await asyncio.sleep(pause_s * (0.5 + self._random.random()))
        raise AssertionError("every attempt returns or is followed by another")

    async def _watched(
        self, call: ToolCall, binding: Binding, timeout_s: float, is_probe: bool
    ) -> Answer:
        """Call once, and tell the circuit breaker how it ended."""
        try:
            answer = await self._once(call, binding, timeout_s)
        except BaseException:
            binding.breaker.abandoned(is_probe=is_probe)
            raise
        if answer.status is ToolStatus.INFRA_ERROR and not isinstance(answer.failure, RewardError):
            binding.breaker.failed(answer.content, is_probe=is_probe)
        else:
            binding.breaker.answered()
        return answer

    async def _once(self, call: ToolCall, binding: Binding, timeout_s: float) -> Answer:
        limits = binding.spec.limits
        try:
            tool = await self._opened(binding)
        except _OpenFailed as error:
            cause = error.__cause__
            text = f"opening the tool failed: {named(cause or error)}"
            return Answer(content=text, status=ToolStatus.INFRA_ERROR, failure=cause)
        try:
            deadline_s = timeout_s + binding.overtime_s
            value = await self._invoke(call.name, tool.call, call.arguments, deadline_s)
            max_chars = _MAX_TOKEN_CHARS * limits.max_output_tokens
            return answer_of(value, tool=call.name, max_chars=max_chars)
        except SandboxUnavailable:  # so it would be for every episode: stop the run
            raise
        except ToolError as error:
            return Answer(content=f"error: {error}", status=ToolStatus.ERROR)
        except (AgentRLError, ConnectionError) as error:
            # Ours, whatever it is: a sandbox, a server, a setting that it refuses, a bad reward.
            return Answer(content=named(error), status=ToolStatus.INFRA_ERROR, failure=error)
        except DeadlinePassed as late:
            note = self._give_up(binding, tool) or late.note
            text = f"error: timed out after {timeout_s:g} s{note}"
            return Answer(content=text, status=ToolStatus.TIMEOUT)
        except Exception as error:
            # Nothing of ours witnesses a failure: a model must not be able to leave its
            # group's baseline by crashing a tool.
            logger.warning("tool %s raised %s", call.name, named(error))
            return Answer(content=f"error: {named(error)}", status=ToolStatus.ERROR)

    async def _invoke(
        self, name: str, method: Callable[..., Any], arguments: dict[str, Any], timeout_s: float
    ) -> Any:
        task = f"{TASK_PREFIX}{name}"
        watch_running_loop()
        if inspect.iscoroutinefunction(method):
            return await within(contained(method(**arguments)), timeout_s, name=task)
        value = await self._toolbox.off_loop.run(
            lambda: contained_call(lambda: method(**arguments)), timeout_s
        )
        if inspect.iscoroutine(value):
            return await within(contained(value), timeout_s, name=task)
        return value

    def _give_up(self, binding: Binding, tool: Tool) -> str:
        """Replace a tool whose thread hangs: two threads in one instance would be a race."""
        name = binding.spec.name
        if binding.overlaps or inspect.iscoroutinefunction(tool.call):
            return ""
        if self._open.get(name) is tool:
            del self._open[name]
            self._close_soon(name, tool)
        return "; its state is lost"

    # ------------------------------------------------------------------ opening, closing

    async def _opened(self, binding: Binding) -> Tool:
        name = binding.spec.name
        async with self._opening[name]:
            tool = self._open.get(name)
            if tool is not None:
                return tool
            if self._closed:  # nobody would close it again
                raise _OpenFailed from InfrastructureError("the tools are closed")
            context = await self._make_context(name)
            try:
                return await self._open_one(binding, context)
            except SandboxUnavailable:  # so it would be for every episode: stop the run
                raise
            except Exception as error:  # opening does not depend on the model
                raise _OpenFailed from error

    async def _open_one(self, binding: Binding, context: ToolContext) -> Tool:
        name, tool = binding.spec.name, contained_call(binding.make)
        try:
            await self._invoke(name, tool.open, {"context": context}, self._open_timeout_s)
        except Exception:
            await self._close_one(name, tool)
            raise
        except BaseException:  # cancelled half-way: closed all the same, and used by nobody
            self._close_soon(name, tool)
            raise
        if self._closed:  # meanwhile: nobody else would close this one
            await self._close_one(name, tool)
            raise InfrastructureError("the tools are closed")
        self._open[name] = tool
        return tool

    def _close_soon(self, name: str, tool: Tool) -> None:
        """Begin to close a tool; :meth:`close` waits for it."""
        closing = asyncio.ensure_future(self._close_one(name, tool))
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)

    async def _close_one(self, name: str, tool: Tool) -> None:
        try:
            await self._invoke(name, tool.close, {}, self._close_timeout_s)
        except Exception as error:
            logger.warning("closing tool %s failed: %s", name, named(error))


class _OpenFailed(Exception):
    """A tool could not be opened; says why by its cause."""
