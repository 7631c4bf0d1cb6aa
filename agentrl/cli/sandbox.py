"""`agentrl sandbox`: check, run, reap, image, serve."""

from __future__ import annotations

import asyncio
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentrl.cli.json_output import json_option, print_json

if TYPE_CHECKING:
    from agentrl.sandbox.base import ExecResult
    from agentrl.sandbox.config import SandboxConfig
    from agentrl.sandbox.serving.settings import ServingSettings


@click.group("sandbox")
def command() -> None:
    """Check sandboxes, run code in one, serve them to other machines."""


_backend = click.option("--backend", default="local", show_default=True)
_backend_kwargs = click.option(
    "--backend-kwargs", metavar="JSON", default="{}", help="Arguments of the backend."
)


@command.command("check")
@_backend
@_backend_kwargs
@json_option
def check(backend: str, backend_kwargs: str, as_json: bool) -> None:
    """Start a backend and say how each limit is enforced on this machine."""
    report = asyncio.run(_report(backend, backend_kwargs))
    if as_json:
        print_json(report)
        return
    click.echo(f"backend    {report['backend']}")
    click.echo(f"isolation  {', '.join(report['isolation']) or 'none'}")
    for name, mechanism in report["limits"].items():
        click.echo(f"{name:10} {mechanism}")
    for warning in report["warnings"]:
        click.secho(f"warning    {warning}", fg="yellow")


@command.command("run")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@_backend
@_backend_kwargs
@click.option("--timeout-s", default=10.0, show_default=True)
def run(file: str, backend: str, backend_kwargs: str, timeout_s: float) -> None:
    """Run a Python file (or - for standard input) in a fresh sandbox."""
    from agentrl.errors import ConfigError

    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        code = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file!r} is no UTF-8 text ({error}); save it as UTF-8") from error
    result = asyncio.run(_run(backend, backend_kwargs, code, timeout_s))
    click.echo(result.stdout, nl=False)
    click.echo(result.stderr, nl=False, err=True)
    if result.result is not None:
        click.echo(result.result)
    if result.status != "ok":
        click.secho(f"{result.status}: {result.error or ''}".rstrip(), fg="red", err=True)
        raise click.exceptions.Exit(1)


@command.command("reap")
@click.option("--backend", default="docker", show_default=True)
@_backend_kwargs
def reap(backend: str, backend_kwargs: str) -> None:
    """Remove what owners that were killed have left; every start of a backend does so, too."""
    from agentrl.errors import ConfigError

    instance = _make_backend(backend, backend_kwargs)
    remove_orphans = getattr(instance, "reap", None)
    if remove_orphans is None:
        raise ConfigError(
            f"sandbox backend {backend!r} has nothing to reap: its sandboxes end with their owner"
        )
    click.echo(f"removed {asyncio.run(remove_orphans())}")


@command.command("image")
@click.option("--base-url", metavar="URL", help="Address of the engine; DOCKER_HOST if not given.")
@click.option("--python", default="/usr/bin/python3", show_default=True, help="Which to take.")
def image(base_url: str | None, python: str) -> None:
    """Build an image for sandbox.id=docker from this machine's Python, without a registry."""
    from agentrl.sandbox.registry import sandbox_registry

    backend: Any = sandbox_registry.get("docker")
    click.echo(backend.build_image(base_url=base_url, python=python))


@command.command("serve")
@_backend
@_backend_kwargs
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=8400, show_default=True, help="0 takes a free one.")
@click.option("--uds", metavar="PATH", help="Listen on a unix socket in place of host and port.")
@click.option("--workers", default=1, show_default=True, help="Processes behind the one port.")
@click.option(
    "--token-env",
    default="AGENTRL_SANDBOX_TOKEN",
    show_default=True,
    help="Environment variable with the bearer token; needed beyond loopback.",
)
@click.option("--max-open", default=512, show_default=True, help="Sandboxes open at once.")
@click.option(
    "--max-limits",
    metavar="JSON",
    default="{}",
    help="The most that a client can ask for, as in '{\"memory_mb\": 1024}'.",
)
@click.option(
    "--ttl-s",
    default=120.0,
    show_default=True,
    help="How long a sandbox lives after its client was last heard of.",
)
@click.option(
    "--advertise-url",
    metavar="URL",
    help="Where clients reach this node, if what they are given leads to a load balancer.",
)
def serve(
    backend: str,
    backend_kwargs: str,
    host: str,
    port: int,
    uds: str | None,
    workers: int,
    token_env: str,
    max_open: int,
    max_limits: str,
    ttl_s: float,
    advertise_url: str | None,
) -> None:
    """Serve sandboxes over HTTP until SIGTERM; then close all of them."""
    from agentrl.cli.options import json_object
    from agentrl.sandbox.serving.settings import ServingSettings
    from agentrl.sandbox.serving.wire import parse_limits

    kwargs = json_object(backend_kwargs, "--backend-kwargs")
    maxima = asdict(ServingSettings().maxima) | json_object(max_limits, "--max-limits")
    settings = ServingSettings(
        backend=backend,
        backend_kwargs=kwargs,
        workers=workers,
        max_open=max_open,
        ttl_s=ttl_s,
        maxima=parse_limits(maxima),
        advertise_url=advertise_url,
        token_env=token_env,
    )
    asyncio.run(_serve(settings, host, port, uds))


async def _serve(settings: ServingSettings, host: str, port: int, uds: str | None) -> None:
    import importlib.util

    from agentrl.errors import ConfigError
    from agentrl.extras import missing_extra

    for name in ("fastapi", "uvicorn"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(missing_extra("server", "agentrl sandbox serve"))
    from agentrl.sandbox.serving.fleet import Fleet, bind

    listening = bind(host, port, uds, has_token=settings.token() is not None)
    shown = f"[{host}]" if ":" in host else host
    where = uds or f"http://{shown}:{listening.getsockname()[1]}"
    fleet = Fleet(settings, listening)
    await fleet.run(
        lambda: click.echo(
            f"serving {settings.backend} sandboxes on {where} with {settings.workers} workers"
        )
    )


def _make_backend(backend: str, backend_kwargs: str) -> Any:
    from agentrl.sandbox.opening import make_backend

    return make_backend(_config(backend, backend_kwargs))


def _config(backend: str, backend_kwargs: str) -> SandboxConfig:
    from agentrl.cli.options import json_object
    from agentrl.sandbox.config import SandboxConfig

    return SandboxConfig(id=backend, kwargs=json_object(backend_kwargs, "--backend-kwargs"))


async def _report(backend: str, backend_kwargs: str) -> dict:
    instance = _make_backend(backend, backend_kwargs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the report has them
            await instance.start()
        return asdict(instance.report())
    finally:
        await instance.close()


async def _run(backend: str, backend_kwargs: str, code: str, timeout_s: float) -> ExecResult:
    from agentrl.sandbox.base import SandboxLimits
    from agentrl.sandbox.opening import open_sandboxes

    async with open_sandboxes(_config(backend, backend_kwargs)) as sandboxes:
        box = await sandboxes.acquire(SandboxLimits(wall_s=timeout_s))
        try:
            return await box.run_code(code)
        finally:
            await box.close()
