"""`agentrl tools`: list, check, call."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from agentrl.types import ToolResult


@click.group("tools")
def command() -> None:
    """List, check and call tools."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_tools(as_json: bool) -> None:
    """List registered tools."""
    from agentrl.errors import AgentRLError
    from agentrl.tool.spec import find_spec, tool_registry

    rows: list[dict[str, str]] = []
    for name in tool_registry.names():
        try:
            spec = find_spec(name)
            rows.append({"name": name, "summary": spec.description.split("\n")[0]})
        except AgentRLError as error:
            rows.append({"name": name, "summary": f"broken: {error}"})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(f"{row['name']:16}{row['summary']}")


@command.command("check")
@click.argument("tool", metavar="NAME_OR_YAML")
@click.option("--allow-import", multiple=True, help="Module prefix the spec may import.")
def check(tool: str, allow_import: tuple[str, ...]) -> None:
    """Check a tool's spec, import what it names, and print what the model is shown."""
    from agentrl.tool.binding import Toolbox

    toolbox = Toolbox([tool], allow_import=allow_import)
    click.echo(json.dumps(toolbox.schemas, indent=2))


@command.command("call")
@click.argument("tool", metavar="NAME_OR_YAML")
@click.argument("arguments", metavar="JSON")
@click.option(
    "--state",
    "state_json",
    metavar="JSON",
    default="{}",
    help="What an environment's tool_state would hand to the tool.",
)
@click.option("--allow-import", multiple=True, help="Module prefix the spec may import.")
def call(tool: str, arguments: str, state_json: str, allow_import: tuple[str, ...]) -> None:
    """Call a tool once, as the model would: agentrl tools call calculator '{"expression": "1+1"}'.

    Exit code 1 where the tool did not answer.
    """
    from agentrl.types import ToolStatus

    values = _json_object(arguments, "the arguments are")
    state = _json_object(state_json, "--state is")
    result = asyncio.run(_call(tool, values, state, allow_import))
    click.echo(result.content)
    if result.status is not ToolStatus.OK:
        click.echo(f"status: {result.status}", err=True)
        raise click.exceptions.Exit(1)


def _json_object(text: str, what: str) -> dict[str, Any]:
    from agentrl.errors import ToolError

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            twice = sorted({name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1})
            raise ToolError(f"{what} ambiguous: {', '.join(twice)} given twice; give it once")
        return values

    shown = repr(text if len(text) <= 200 else f"{text[:197]}...")
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{what} no JSON ({error}); got {shown}") from error
    if not isinstance(value, dict):
        raise ToolError(f"{what} no JSON object but {type(value).__name__}; got {shown}")
    return value


async def _call(
    tool: str, values: dict[str, Any], state: dict[str, Any], allow_import: tuple[str, ...]
) -> ToolResult:
    from agentrl.playground import open_sandboxes
    from agentrl.sandbox.config import SandboxConfig
    from agentrl.tool.base import ToolContext
    from agentrl.tool.binding import Toolbox
    from agentrl.tool.executor import ToolExecutor
    from agentrl.types import ToolCall

    toolbox = Toolbox([tool], allow_import=allow_import)
    async with open_sandboxes(SandboxConfig()) as sandboxes:

        async def context(name: str) -> ToolContext:
            return ToolContext(trajectory_id="cli", seed=0, sandboxes=sandboxes, state=state)

        executor = ToolExecutor(toolbox, make_context=context, cut=lambda text, limit: (text, 0))
        try:
            name = next(iter(toolbox.bindings))
            return await executor.run(ToolCall(name=name, arguments=values))
        finally:
            await executor.close()
