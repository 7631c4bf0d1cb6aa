"""Every installed tool keeps the contract of a tool, whoever wrote it."""

from __future__ import annotations

import pytest

from agentrl.agent.renderer import Renderer
from agentrl.testing import make_tokenizer
from agentrl.tool.base import Tool
from agentrl.tool.binding import Toolbox
from agentrl.tool.spec import tool_registry

each_tool = pytest.mark.parametrize("name", tool_registry.names())


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
    import asyncio
    import inspect

    closed = Toolbox([name]).bindings[name].make().close()
    if inspect.isawaitable(closed):

        async def wait() -> None:
            await closed

        asyncio.run(wait())
