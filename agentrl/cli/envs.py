"""`agentrl envs`: list, show, check."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import TYPE_CHECKING, Any

import click

from agentrl.cli.json_output import json_option, print_json
from agentrl.cli.options import overrides_argument, quote

if TYPE_CHECKING:
    from agentrl.env.config import EnvConfig


@click.group("envs")
def command() -> None:
    """List, show and check environments."""


@command.command("list")
@json_option
def list_envs(as_json: bool) -> None:
    """List registered environments; one that cannot be imported is listed with its error."""
    from agentrl.env.registry import env_registry
    from agentrl.errors import AgentRLError

    rows: list[dict[str, str]] = []
    for name in env_registry.names():
        try:
            summary = (inspect.getdoc(env_registry.get(name)) or "").split("\n")[0]
            rows.append({"id": name, "summary": summary})
        except AgentRLError as error:
            rows.append({"id": name, "summary": f"broken: {error}"})
    if as_json:
        print_json(rows)
        return
    width = max((len(row["id"]) for row in rows), default=0)
    for row in rows:
        click.echo(f"{row['id']:{width}}  {row['summary']}")


@command.command("show")
@click.argument("env_id", metavar="ID")
@overrides_argument
@click.option("--split", default="train", show_default=True)
@json_option
def show_env(env_id: str, overrides: tuple[str, ...], split: str, as_json: bool) -> None:
    """Show what an environment is: arguments, tools, tasks, and its first observation."""
    facts = _facts(_env_config(env_id, overrides), split)
    if as_json:
        print_json(facts, default=str)
        return
    for key, value in facts.items():
        text = value if isinstance(value, str) else json.dumps(value, indent=2, default=str)
        separator = "\n" if "\n" in text else " "
        click.echo(f"{click.style(key, bold=True)}:{separator}{text}")


@command.command("check")
@click.argument("env_id", metavar="ID")
@overrides_argument
@json_option
def check(env_id: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check an environment against its contract; exit code 1 where it breaks it.

    Findings that differ in numbers and quoted values only are shown once; --json lists them all.
    """
    from agentrl.env.check import check_env
    from agentrl.env.findings import Level, grouped
    from agentrl.tool.binding import Toolbox

    config = _env_config(env_id, overrides)
    findings = asyncio.run(check_env(config, resolve_tool=lambda name: Toolbox([name])))
    if as_json:
        rows = [{"level": str(f.level), "what": f.what, "fix": f.fix} for f in findings]
        print_json(rows)
    else:
        for finding, num_more in grouped(findings):
            more = f" (and {num_more} more like it)" if num_more else ""
            click.echo(f"{finding.level}: {finding.what}{more}\n  fix: {finding.fix}")
        if not findings:
            click.echo(f"{env_id}: nothing to complain about")
    if any(finding.level is Level.ERROR for finding in findings):
        raise click.exceptions.Exit(1)


def _env_config(env_id: str, overrides: tuple[str, ...]) -> EnvConfig:
    """Read settings of ``env``; those of its ``kwargs`` may be written as ``name=value``."""
    from agentrl.config.load import load

    prefixed = [item if item.startswith("env.") else f"env.kwargs.{item}" for item in overrides]
    return load([f"env.id={quote(env_id)}", *prefixed]).env


def _facts(config: EnvConfig, split: str) -> dict[str, Any]:
    from agentrl.env.base import Env
    from agentrl.env.registry import env_class, make_env
    from agentrl.env.table import converted
    from agentrl.env.validate import check_reset, check_tools
    from agentrl.rollout.tasks import check_tasks, read_split

    env_id = config.id
    label = f"environment {env_id!r}"
    cls = env_class(env_id)
    env = make_env(env_id, config.kwargs)
    tasks = read_split(env, split, env_id=env_id, timeout_s=config.tasks_timeout_s)
    if len(tasks):
        check_tasks(tasks, source=f"{env_id} {split}")
    facts: dict[str, Any] = {
        "id": env_id,
        "summary": inspect.getdoc(cls) or "",
        "arguments": str(inspect.signature(cls)),
        "tools": list(check_tools(env.tools, env=label)),
        f"tasks ({split})": len(tasks),
    }
    if len(tasks):
        facts["first task"] = {"id": tasks[0].id, "tags": dict(tasks[0].tags)}
    if len(tasks) and isinstance(env, Env):
        with converted(label, "reset"):
            value = env.reset(seed=0, options={"task": tasks[0]})
        facts["first observation"], _ = check_reset(value, env=label)
        with converted(label, "close"):
            env.close()
    return facts
