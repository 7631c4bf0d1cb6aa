"""`agentrl train`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from agentrl.cli.options import env_option, overrides_argument, prepare_process, with_env


@click.command("train")
@env_option
@click.option("--resume", metavar="RUN", help="Go on with a run directory.")
@overrides_argument
def command(env_id: str | None, resume: str | None, overrides: tuple[str, ...]) -> None:
    """Train a policy in an environment.

    \b
    agentrl train --env code_sandbox
    agentrl train --env ./my_env.py:MyEnv trainer.total_steps=100 rollout.n=16
    agentrl train 'env.mix=[{id: guess_number, weight: 2}, {id: calculator}]'
    agentrl train --resume runs/code_sandbox-20260101-1
    """
    from agentrl.config.load import load
    from agentrl.resuming import resumed_config

    settings = with_env(overrides, env_id)
    config = load(settings) if resume is None else resumed_config(resume, settings)
    prepare_process(config.trainer.num_threads)
    quiet = config.telemetry.quiet

    def announce(text: str) -> None:
        if not quiet:
            click.echo(text, err=True)

    from agentrl.errors import Interrupted
    from agentrl.launch import train
    from agentrl.limits import within_positions
    from agentrl.train.preemption import going_on, resume_command

    if resume is None:
        config = within_positions(config, settings, announce=announce)
    runs = [] if resume is None else [Path(resume)]
    try:
        asyncio.run(train(config, announce=announce, begun=runs.append))
    except KeyboardInterrupt:  # everything is closed by now, checkpoints too
        if not runs:  # nothing was written that could be resumed
            raise
        run = runs[-1]
        raise Interrupted(f"stopped by Ctrl-C; {going_on(run, resume_command(run))}") from None
