"""`agentrl export`."""

from __future__ import annotations

from pathlib import Path

import click

from agentrl.cli.options import check_out_dir


@click.command("export")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Checkpoint to export; the newest unless given.")
def command(run: Path, out: Path, step: int | None) -> None:
    """Write a run's policy as a directory that AutoModelForCausalLM loads.

    \b
    agentrl export runs/code_sandbox-20260101-1 my_model
    """
    from agentrl.model.load import quiet_transformers
    from agentrl.train.open_model import open_run_model

    check_out_dir(out)
    loaded = open_run_model(run, step=step)
    with quiet_transformers():
        loaded.model.save_pretrained(out)
        loaded.tokenizer.save_pretrained(out)
    click.echo(f"{out}: {loaded.source}, {loaded.model.num_parameters():,} parameters")
