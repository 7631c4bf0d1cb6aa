"""`agentrl tools serve`: tools over HTTP and MCP."""

from __future__ import annotations

import asyncio

import click


@click.command("serve")
@click.argument("tools", metavar="NAME_OR_YAML ...", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8200, show_default=True, help="0 takes a free one.")
@click.option(
    "--token-env",
    "token_envs",
    metavar="NAME",
    multiple=True,
    help="Environment variable with a token that callers must give; several may be named.",
)
@click.option("--sandbox", default="local", show_default=True, help="Backend of sandboxed tools.")
@click.option(
    "--sandbox-kwargs", metavar="JSON", default="{}", help="Arguments of the sandbox backend."
)
@click.option("--max-sessions", default=4096, show_default=True, help="Trajectories at once.")
@click.option(
    "--session-ttl", default=900.0, show_default=True, help="Seconds until an idle one is closed."
)
@click.option("--max-requests", default=2048, show_default=True, help="Requests at once.")
@click.option("--max-body", default=4 * 2**20, show_default=True, help="Bytes of a request.")
@click.option("--allow-import", multiple=True, help="Module prefix the specs may import.")
@click.option("--allow-command", multiple=True, help="Program the specs may start.")
def serve(
    tools: tuple[str, ...],
    host: str,
    port: int,
    token_envs: tuple[str, ...],
    sandbox: str,
    sandbox_kwargs: str,
    max_sessions: int,
    session_ttl: float,
    max_requests: int,
    max_body: int,
    allow_import: tuple[str, ...],
    allow_command: tuple[str, ...],
) -> None:
    """Serve tools over HTTP and MCP; a trajectory is a session, which keeps their state.

    Prints the URL once it answers. SIGTERM lets calls end and closes every session.
    """
    from agentrl.cli.options import json_object
    from agentrl.errors import ConfigError
    from agentrl.extras import missing_extra
    from agentrl.tool.binding import Toolbox
    from agentrl.tool.serving.access import read_tokens
    from agentrl.tool.serving.config import ServerLimits

    kwargs = json_object(sandbox_kwargs, "--sandbox-kwargs")
    tokens = read_tokens(token_envs, host=host)
    limits = ServerLimits(
        max_sessions=max_sessions,
        session_ttl_s=session_ttl,
        max_requests=max_requests,
        max_body_bytes=max_body,
    )
    toolbox = Toolbox(tools, allow_import=allow_import, allow_command=allow_command)
    try:
        from agentrl.tool.serving.app import ToolServer
        from agentrl.tool.serving.run import listen
        from agentrl.tool.serving.run import serve as run_server
    except ImportError as error:
        raise ConfigError(missing_extra("server", "agentrl tools serve")) from error
    from agentrl.sandbox.config import SandboxConfig
    from agentrl.sandbox.opening import open_sandboxes

    async def main() -> None:
        def ready(url: str) -> None:
            click.echo(f"serving {', '.join(toolbox.bindings)} on {url}")

        config = SandboxConfig(id=sandbox, kwargs=kwargs, max_open=max_sessions)
        async with open_sandboxes(config) as sandboxes:
            server = ToolServer(toolbox, sandboxes=sandboxes, tokens=tokens, limits=limits)
            await run_server(server, listen(host, port), ready=ready)

    asyncio.run(main())
