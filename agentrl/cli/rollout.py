"""`agentrl rollout`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from agentrl.cli.options import (
    check_out_file,
    env_option,
    model_option,
    overrides_argument,
    prepare_process,
)


@click.command("rollout")
@env_option
@model_option
@click.option("-n", "num_samples", default=1, show_default=True, help="Samples per task.")
@click.option("--split", default="train", show_default=True)
@click.option(
    "--tasks",
    "num_tasks",
    default=8,
    show_default=True,
    help="Tasks of each environment; 0 takes all.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="Where to write (JSONL)."
)
@overrides_argument
def command(
    env_id: str | None,
    model: str | None,
    num_samples: int,
    split: str,
    num_tasks: int,
    out: Path,
    overrides: tuple[str, ...],
) -> None:
    """Play episodes and write the trajectories, failures too, with their tokens beside them."""
    from agentrl.play import play_split, playing_config
    from agentrl.telemetry.trajectory_io import tokens_path, write_trajectories

    config = playing_config(env_id, model, overrides)
    check_out_file(out)
    prepare_process(config.trainer.num_threads)
    trajectories = asyncio.run(
        play_split(config, split=split, num_samples=num_samples, num_tasks=num_tasks)
    )
    write_trajectories(out, trajectories)
    num_failed = sum(trajectory.failed for trajectory in trajectories)
    click.echo(
        f"{len(trajectories)} trajectories ({num_failed} failed) in {out}, "
        f"tokens in {tokens_path(out)}"
    )
