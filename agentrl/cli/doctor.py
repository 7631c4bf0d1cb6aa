"""`agentrl doctor`."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from agentrl.cli.json_output import json_option, print_json
from agentrl.cli.options import env_option, overrides_argument, with_env

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("doctor")
@env_option
@json_option
@overrides_argument
def command(env_id: str | None, as_json: bool, overrides: tuple[str, ...]) -> None:
    """Plan the memory of a run and check this machine; starts nothing.

    Settings are those of `agentrl train`. Ends with code 1 where something is missing that they
    need.

    \b
    agentrl doctor
    agentrl doctor --env code_sandbox model.path=Qwen/Qwen3-0.6B cluster=ray cluster.gpus=2
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from rich.console import Console

    from agentrl.dist.memory_table import as_json as plan_as_json
    from agentrl.dist.memory_table import show
    from agentrl.doctor import diagnose

    found = diagnose(with_env(overrides, env_id))
    if as_json:
        plan = None if found.planned is None else plan_as_json(found.planned)
        checks = [asdict(check) for check in found.checks]
        print_json({"failed": found.failed, "checks": checks, "memory": plan})
    else:
        if found.planned is not None:
            show(found.planned, Console())
        for check in found.checks:
            mark = click.style(f"{check.status:4}", fg=_COLOURS[check.status])
            click.echo(f"{mark}  {check.name:18} {check.found}")
            for line in check.fix.splitlines():
                click.echo(f"{'':25}{line}")
    if found.failed:
        raise click.exceptions.Exit(1)
