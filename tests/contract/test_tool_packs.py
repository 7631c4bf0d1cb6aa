"""Every installed tool keeps the contract of a tool, whoever wrote it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from typing import Any

import pytest
from agentrl_sandboxes.local import LocalBackend

from agentrl.agent.renderer import Renderer
from agentrl.sandbox.pool import SandboxPool
from agentrl.testing import make_tokenizer
from agentrl.tool.base import Tool, ToolContext
from agentrl.tool.binding import Toolbox
from agentrl.tool.executor import ToolExecutor
from agentrl.tool.spec import tool_registry
from agentrl.tool.workspace import Workspace
from agentrl.types import ToolCall, ToolResult, ToolStatus

each_tool = pytest.mark.parametrize("name", tool_registry.names())

CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "bash": ({"command": "echo $((6 * 7))"}, "42"),
    "calculator": ({"expression": "6 * 7"}, "42"),
    "edit_file": ({"path": "a.txt", "command": "create", "new_text": "a"}, "wrote a.txt: 1 lines"),
    "http_fetch": ({"url": "http://example.com/"}, "allowed"),
    "python": ({"code": "6 * 7"}, "42"),
    "search": ({"query": "pendulum"}, "[clock]"),
    "search_files": ({}, "nothing found in 0 files"),
    "view_file": ({"path": "missing"}, "No such file"),
}
"""A call of each tool of ours, and what its answer holds; also without any set-up."""


def call_once(name: str, arguments: Mapping[str, Any]) -> tuple[ToolResult, ToolExecutor, int]:
    """Call a tool as a trajectory does; return what it answered, and how many boxes stay open."""

    async def main() -> tuple[ToolResult, ToolExecutor, int]:
        toolbox = Toolbox([name])
        async with asyncio.timeout(60), SandboxPool(LocalBackend()) as pool:
            workspace = Workspace(pool, limits=toolbox.workspace_limits)

            async def context(tool: str) -> ToolContext:
                return ToolContext(
                    trajectory_id="t", seed=0, sandboxes=pool, workspace=workspace.open
                )

            executor = ToolExecutor(
                toolbox, make_context=context, cut=lambda text, limit: (text, 0)
            )
            result = await executor.run(ToolCall(name=name, arguments=dict(arguments)))
            await executor.close()
            await workspace.close()
            return result, executor, pool.open

    return asyncio.run(main())


@each_tool
def test_it_is_named_as_it_is_registered_and_can_be_bound(name: str):
    box = Toolbox([name])
    assert list(box.bindings) == [name]
    assert isinstance(box.bindings[name].make(), Tool)


@each_tool
def test_instances_are_separate(name: str):
    binding = Toolbox([name]).bindings[name]
    assert binding.make() is not binding.make()


@each_tool
def test_the_chat_template_can_show_it(name: str):
    Renderer(make_tokenizer()).check(Toolbox([name]).schemas)


@each_tool
def test_closing_without_opening_is_harmless(name: str):
    closed = Toolbox([name]).bindings[name].make().close()
    if inspect.isawaitable(closed):

        async def wait() -> None:
            await closed

        asyncio.run(wait())


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.timeout(120)
def test_it_opens_answers_and_leaves_nothing_open(name: str):
    arguments, expected = CALLS[name]
    result, executor, num_open = call_once(name, arguments)
    assert expected in result.content
    assert result.status in (ToolStatus.OK, ToolStatus.ERROR), executor.failure
    assert "Error:" not in result.content, "an exception that nobody meant"
    assert num_open == 0


@each_tool
@pytest.mark.timeout(120)
def test_bad_arguments_are_told_in_one_line_and_open_nothing(name: str):
    for arguments in ({"no_such_argument": 1}, {next(iter(_properties(name)), "x"): [[]]}):
        result, _, num_open = call_once(name, arguments)
        assert result.status is ToolStatus.ERROR
        assert result.content.startswith("error: ")
        assert len(result.content) < 500 and "\n" not in result.content
        assert num_open == 0


@each_tool
def test_its_sandbox_has_ended_a_call_before_the_tools_own_deadline(name: str):
    binding = Toolbox([name]).bindings[name]
    if binding.workspace_limits is not None:
        assert binding.workspace_limits.wall_s + 5 < binding.spec.limits.timeout_s


def test_every_tool_of_ours_is_called_here():
    ours = {name for name in tool_registry.names() if _is_ours(name)}
    assert ours == set(CALLS)


def _properties(name: str) -> Mapping[str, Any]:
    return Toolbox([name]).bindings[name].spec.parameters.get("properties", {})


def _is_ours(name: str) -> bool:
    return "agentrl_tools" in Toolbox([name]).bindings[name].spec.path.parts
