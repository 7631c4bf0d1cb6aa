"""`agentrl mismatch`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentrl.cli.json_output import json_option, print_json

if TYPE_CHECKING:
    from agentrl.telemetry.divergence import TokenDivergence, TrajectoryDivergence


@click.command("mismatch")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--step", type=int, help="Step; default: the newest one stored.")
@click.option(
    "--threshold",
    type=click.FloatRange(min=0.0),
    default=0.1,
    show_default=True,
    help="Difference, in nats, that counts as one.",
)
@click.option(
    "--top", type=click.IntRange(min=1), default=10, show_default=True, help="Trajectories to list."
)
@json_option
def command(run: Path, step: int | None, threshold: float, top: int, as_json: bool) -> None:
    """Name the tokens on which engine and trainer disagree, worst trajectory first.

    Of each trajectory: the first token whose log-probabilities differ by more than --threshold, and
    the one that differs most.
    """
    from agentrl.errors import DataError
    from agentrl.telemetry.divergence import quiet_decoder, run_divergences
    from agentrl.telemetry.run_dir import RunDir

    opened = RunDir(run)
    steps = opened.trajectory_steps()
    if step is None:
        if not steps:
            raise DataError(f"{str(run)!r} holds no trajectories; see trainer.trajectories")
        step = steps[-1]
    decoder = quiet_decoder(opened)
    found = run_divergences(opened, step, threshold=threshold, top=top, decoder=decoder)
    if as_json:
        print_json({"step": step, "trajectories": [asdict(item) for item in found]})
        return
    if not found:
        click.echo(f"step {step}: the trainer has scored no token of what is stored")
        return
    click.echo(f"step {step}: {len(found)} trajectories, those furthest apart first")
    for item in found:
        click.echo(_lines(item, threshold))


def _lines(item: TrajectoryDivergence, threshold: float) -> str:
    head = f"\n{item.id}  {item.num_tokens} tokens, mean difference {item.abs_mean:.3g} nats"
    first = f"  first above {threshold:g}: "
    first += "none" if item.first is None else _token(item.first)
    return f"{head}\n{first}\n  largest:{' ' * (len(first.split(':')[0]) - 9)} {_token(item.worst)}"


def _token(token: TokenDivergence) -> str:
    return (
        f"turn {token.turn + 1}, token {token.index}: {token.text!r} (id {token.token_id})  "
        f"engine {token.engine:.5f}  trainer {token.trainer:.5f}  "
        f"difference {token.difference:+.3g}  version {token.version}"
    )
