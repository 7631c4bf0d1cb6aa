"""The command line. Each verb lives in a module of its own and loads when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from agentrl.errors import AgentRLError

_VERBS = {
    "train": "Train a policy in an environment.",
    "eval": "Measure a model or a run on held-out tasks.",
    "sft": "Fine-tune on demonstrations or conversations.",
    "rollout": "Play episodes and write the trajectories.",
    "export": "Write a run's policy as a Hugging Face directory.",
    "report": "Write report.html and curves.png of a run.",
    "mismatch": "Name the tokens on which engine and trainer disagree.",
    "envs": "List, show and check environments.",
    "tools": "List, check, call and serve tools.",
    "sandbox": "Check sandboxes, run code in one, serve them.",
    "bench": "Measure rollouts, weight syncs and whole steps.",
    "doctor": "Plan the memory of a run and check this machine.",
}
_OTHER_NAMES = {"sandboxes": "sandbox"}
"""Beside `envs` and `tools` the plural comes to mind as well."""


class _LazyGroup(click.Group):
    """Knows its verbs by name and imports one only to run it, so that --help stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in the order in which a user meets them."""
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a verb."""
        cmd_name = _OTHER_NAMES.get(cmd_name, cmd_name)
        if cmd_name not in _VERBS:
            return None
        return importlib.import_module(f"agentrl.cli.{cmd_name}").command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List verbs without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest verb for an unknown one."""
        import difflib

        known = {*_VERBS, *_OTHER_NAMES}
        if args and args[0] not in known and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], _VERBS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(_VERBS)}."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="agentrl", prog_name="agentrl")
def cli() -> None:
    """Train tool-using language-model agents with reinforcement learning.

    Start with: agentrl train --env code_sandbox
    """


def main() -> None:
    """Run the command line; errors of ours and of paths are one message and exit code 2."""
    # Threads that spin while they wait starve the sandboxes on small machines. Read when torch
    # loads, so it has to stand here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from agentrl.errors import EXIT_INTERRUPTED, AgentRLError, ConfigError
    from agentrl.extras import misfit

    try:
        code = cli.main(standalone_mode=False)
    except SystemExit as ending:
        # Verbs end with click's own Exit, so this comes from code that was plugged in.
        _refuse(_exited(ending))
    except AgentRLError as error:
        _refuse(error)
    except OSError as error:
        if error.filename is None:  # of no path that a user could mend
            raise
        _refuse(error)
    except BaseExceptionGroup as group:
        cause = _first_leaf(group)
        if isinstance(cause, SystemExit):
            cause = _exited(cause)
        if not isinstance(cause, AgentRLError):
            raise
        _refuse(cause)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except (ImportError, RuntimeError) as error:
        if (problem := misfit(error)) is None:
            raise
        _refuse(ConfigError(problem))
    if isinstance(code, int) and code:
        sys.exit(code)


def _refuse(error: BaseException) -> NoReturn:
    from agentrl.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Interrupted, Preempted

    click.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
    codes = {Preempted: EXIT_PREEMPTED, Interrupted: EXIT_INTERRUPTED}
    sys.exit(codes.get(type(error), 2))


def _exited(ending: SystemExit) -> AgentRLError:
    """Return what to say of an exit that would pass for a verb that has done its work."""
    from agentrl.errors import AgentRLError

    place = ending.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    code = place.tb_frame.f_code if place is not None else None
    where = f" in {code.co_name} of {code.co_filename}:{place.tb_lineno}" if code and place else ""
    return AgentRLError(
        f"sys.exit({ending.code!r}) was called{where} before the command had done its work; raise "
        "an error there, or return"
    )


def _first_leaf(error: BaseException) -> BaseException:
    """Return the first error in a group; what followed it is mostly its consequence."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    main()
