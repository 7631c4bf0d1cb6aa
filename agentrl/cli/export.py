"""`agentrl export`."""

from __future__ import annotations

from pathlib import Path

import click

from agentrl.cli.options import check_out_dir
from agentrl.errors import ConfigError

_MAKE_A_MODEL = ("config.json", "adapter_config.json")
"""What a folder is loaded by: written last, so that half an export is no model."""


@click.command("export")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Checkpoint to export; the newest unless given.")
@click.option("--best", is_flag=True, help="Export the best on the validation split.")
@click.option("--adapters", is_flag=True, help="Export adapters alone, as peft loads them.")
def command(run: Path, out: Path, step: int | None, best: bool, adapters: bool) -> None:
    """Write a run's policy as a directory that AutoModelForCausalLM loads.

    Needs no GPU, on however many the run was trained. Adapters are merged unless asked for.

    \b
    agentrl export runs/code_sandbox-20260101-1 my_model
    agentrl export runs/code_sandbox-20260101-1 my_model --best
    """
    from agentrl.model.load import quiet_transformers
    from agentrl.telemetry.files import filling
    from agentrl.train.open_model import export_adapters, open_run_model

    if best and step is not None:
        raise ConfigError(f"--best and --step {step}: which one is meant? Leave one of them out")
    check_out_dir(out)
    if adapters:
        with filling(out, last=_MAKE_A_MODEL) as writing:
            source = export_adapters(run, writing, step=step, best=best)
        click.echo(f"{out}: adapters of {source}")
        return
    loaded = open_run_model(run, device="cpu", step=step, best=best)
    with quiet_transformers(), filling(out, last=_MAKE_A_MODEL) as writing:
        loaded.model.save_pretrained(writing)
        loaded.tokenizer.save_pretrained(writing)
    click.echo(f"{out}: {loaded.source}, {loaded.model.num_parameters():,} parameters")
