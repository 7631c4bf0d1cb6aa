"""`agentrl sandbox`: check, run."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

import click


@click.group("sandbox")
def command() -> None:
    """Check sandboxes, run code in one."""


@command.command("check")
@click.option("--backend", default="local", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(backend: str, as_json: bool) -> None:
    """Start a backend and say how each limit is enforced on this machine."""
    report = asyncio.run(_report(backend))
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    click.echo(f"backend    {report['backend']}")
    click.echo(f"isolation  {', '.join(report['isolation']) or 'none'}")
    for name, mechanism in report["limits"].items():
        click.echo(f"{name:10} {mechanism}")
    for warning in report["warnings"]:
        click.secho(f"warning    {warning}", fg="yellow")


@command.command("run")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.option("--backend", default="local", show_default=True)
@click.option("--timeout-s", default=10.0, show_default=True)
def run(file: str, backend: str, timeout_s: float) -> None:
    """Run a Python file (or - for standard input) in a fresh sandbox."""
    from agentrl.errors import ConfigError

    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        code = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file!r} is no UTF-8 text ({error}); save it as UTF-8") from error
    result = asyncio.run(_run(backend, code, timeout_s))
    click.echo(result.stdout, nl=False)
    click.echo(result.stderr, nl=False, err=True)
    if result.result is not None:
        click.echo(result.result)
    if result.status != "ok":
        click.secho(f"{result.status}: {result.error or ''}".rstrip(), fg="red", err=True)
        raise click.exceptions.Exit(1)


async def _report(backend: str) -> dict:
    from agentrl.sandbox.registry import sandbox_registry

    instance = sandbox_registry.get(backend)()
    try:
        await instance.start()
        return asdict(instance.report())
    finally:
        await instance.close()


async def _run(backend: str, code: str, timeout_s: float):
    from agentrl.playground import open_sandboxes
    from agentrl.sandbox.base import SandboxLimits
    from agentrl.sandbox.config import SandboxConfig

    async with open_sandboxes(SandboxConfig(id=backend)) as sandboxes:
        box = await sandboxes.acquire(SandboxLimits(wall_s=timeout_s))
        try:
            return await box.run_code(code)
        finally:
            await box.close()
