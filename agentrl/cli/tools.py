"""`agentrl tools`: list, check, call, serve."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from agentrl.cli.json_output import json_option, keep_stdout_clear, print_json
from agentrl.cli.tools_serve import serve

if TYPE_CHECKING:
    from agentrl.types import ToolResult


@click.group("tools")
def command() -> None:
    """List, check, call and serve tools."""


command.add_command(serve)


@command.command("list")
@json_option
def list_tools(as_json: bool) -> None:
    """List registered tools."""
    from agentrl.errors import AgentRLError
    from agentrl.tool.spec import find_specs, tool_registry

    rows: list[dict[str, str]] = []
    for name in tool_registry.names():
        try:
            for spec in find_specs(name):
                rows.append({"name": name, "summary": spec.description.split("\n")[0]})
        except AgentRLError as error:
            rows.append({"name": name, "summary": f"broken: {error}"})
    if as_json:
        print_json(rows)
        return
    for row in rows:
        click.echo(f"{row['name']:16}{row['summary']}")


@command.command("check")
@click.argument("tools", metavar="NAME_OR_YAML ...", nargs=-1, required=True)
@click.option("--allow-import", multiple=True, help="Module prefix the specs may import.")
@click.option("--allow-command", multiple=True, help="Program the specs may start.")
def check(
    tools: tuple[str, ...], allow_import: tuple[str, ...], allow_command: tuple[str, ...]
) -> None:
    """Check specs, import and ask what they name, and print what the model is shown."""
    from agentrl.tool.binding import Toolbox

    keep_stdout_clear()
    toolbox = Toolbox(tools, allow_import=allow_import, allow_command=allow_command)
    print_json(toolbox.schemas)


@command.command("schema")
def schema() -> None:
    """Print the JSON Schema of a spec file, for editors."""
    from agentrl.tool.file_schema import spec_file_schema

    print_json(spec_file_schema())


@command.command("call")
@click.argument("calls", metavar="NAME_OR_YAML JSON ...", nargs=-1, required=True)
@click.option(
    "--state",
    "state_json",
    metavar="JSON",
    default="{}",
    help="What an environment's tool_state would hand to the tools.",
)
@click.option("--allow-import", multiple=True, help="Module prefix the specs may import.")
@click.option("--allow-command", multiple=True, help="Program the specs may start.")
def call(
    calls: tuple[str, ...],
    state_json: str,
    allow_import: tuple[str, ...],
    allow_command: tuple[str, ...],
) -> None:
    """Call tools, as the model would: agentrl tools call calculator '{"expression": "1+1"}'.

    Several calls (a tool and its arguments each) are made in order, in one trajectory: state and
    workspace last from one to the next. SPEC.yaml#NAME is one tool of several. Exit code 1 where a
    tool did not answer.
    """
    from agentrl.errors import ToolError
    from agentrl.types import ToolStatus

    if len(calls) % 2:
        raise ToolError(
            f"calls are pairs of a tool and its arguments, got {len(calls)} words; a tool without "
            "arguments takes '{}'"
        )
    tools, texts = calls[::2], calls[1::2]
    values = [_json_object(text, "the arguments are") for text in texts]
    state = _json_object(state_json, "--state is")
    failed = False
    for result in asyncio.run(_call(tools, values, state, allow_import, allow_command)):
        click.echo(result.content)
        if result.status is not ToolStatus.OK:
            click.echo(f"status: {result.status}", err=True)
            failed = True
    if failed:
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


def _tool_name(tool: str, entries: Mapping[str, str]) -> str:
    """Return the name under which a toolbox has NAME, SPEC.yaml or SPEC.yaml#NAME."""
    from agentrl.errors import ToolError

    entry, _, wanted = tool.partition("#")
    names = [name for name, origin in entries.items() if origin == entry]
    if wanted in names or (len(names) == 1 and not wanted):
        return wanted or names[0]
    problem = f"has no tool {wanted!r}" if wanted else "has several tools"
    raise ToolError(f"{entry} {problem}; write {entry}#NAME with one of: {', '.join(names)}")


async def _call(
    tools: Sequence[str],
    values: Sequence[dict[str, Any]],
    state: dict[str, Any],
    allow_import: tuple[str, ...],
    allow_command: tuple[str, ...],
) -> list[ToolResult]:
    from agentrl.sandbox.config import SandboxConfig
    from agentrl.sandbox.opening import open_sandboxes
    from agentrl.tool.base import ToolContext
    from agentrl.tool.binding import Toolbox
    from agentrl.tool.executor import ToolExecutor
    from agentrl.tool.workspace import Workspace
    from agentrl.types import ToolCall

    entries = dict.fromkeys(tool.partition("#")[0] for tool in tools)
    toolbox = Toolbox(list(entries), allow_import=allow_import, allow_command=allow_command)
    names = [_tool_name(tool, toolbox.state_keys) for tool in tools]

    async def given_state() -> dict[str, Any]:
        return state

    async with open_sandboxes(SandboxConfig()) as sandboxes:
        workspace = Workspace(sandboxes, limits=toolbox.workspace_limits, load_state=given_state)

        async def context(name: str) -> ToolContext:
            return ToolContext(
                trajectory_id="cli",
                seed=0,
                sandboxes=sandboxes,
                state=state,
                workspace=workspace.open,
            )

        executor = ToolExecutor(toolbox, make_context=context, cut=lambda text, limit: (text, 0))
        try:
            return [
                await executor.run(ToolCall(name=name, arguments=arguments))
                for name, arguments in zip(names, values, strict=True)
            ]
        finally:
            await executor.close()
            await workspace.close()
