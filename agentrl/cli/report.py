"""`agentrl report`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("report")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
def command(run: Path) -> None:
    """Write report.html and curves.png of a run, finished or not."""
    from agentrl.launch import write_report

    write_report(run)
    click.echo(str(run / "report.html"))
