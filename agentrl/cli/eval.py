"""`agentrl eval`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentrl.cli.json_output import json_option, print_json
from agentrl.cli.options import (
    check_out_file,
    env_option,
    model_option,
    overrides_argument,
    prepare_process,
)

if TYPE_CHECKING:
    from agentrl.telemetry.evaluation import StratumResult


@click.command("eval")
@env_option
@model_option
@click.option("-n", "num_samples", default=1, show_default=True, help="Samples per task.")
@click.option("--split", default="test", show_default=True)
@click.option(
    "--tasks", "num_tasks", default=0, help="Tasks of the split, of each environment; 0 takes all."
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the trajectories here (JSONL).")
@json_option
@overrides_argument
def command(
    env_id: str | None,
    model: str | None,
    num_samples: int,
    split: str,
    num_tasks: int,
    out: Path | None,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Measure a model or a run on held-out tasks: mean@n, pass@k, with 95 % intervals.

    \b
    agentrl eval --model runs/code_sandbox-20260101-1 -n 8
    agentrl eval --env code_sandbox --model Qwen/Qwen3-0.6B --tasks 64 eval.temperature=0.7
    agentrl eval --model Qwen/Qwen3-0.6B 'env.mix=[{id: code_sandbox}, {id: calculator}]'
    """
    from agentrl.env.entries import environments, run_label
    from agentrl.play import play_split, playing_config
    from agentrl.telemetry.evaluation import evaluate_strata
    from agentrl.telemetry.trajectory_io import write_trajectories

    config = playing_config(env_id, model, overrides)
    if out is not None:
        check_out_file(out)
    prepare_process(config.trainer.num_threads)
    trajectories = asyncio.run(
        play_split(config, split=split, num_samples=num_samples, num_tasks=num_tasks)
    )
    if out is not None:
        write_trajectories(out, trajectories)
    # Each environment by itself: a mean over different ones depends on how many tasks they have.
    by_env = {
        entry.name: [item for item in trajectories if item.env_id == entry.name]
        for entry in environments(config.env)
    }
    results = {env: evaluate_strata(items) for env, items in by_env.items()}
    if as_json:
        temperature = config.eval.temperature
        report = {
            "env": run_label(config.env),
            "split": split,
            "model": config.model.path,
            "temperature": config.rollout.temperature if temperature is None else temperature,
            "samples_per_task": num_samples,
            "results": [
                {"env": env, **_as_json(result)}
                for env, found in results.items()
                for result in found
            ],
        }
        print_json(report)
        return
    for env, found in results.items():
        failed = sum(trajectory.failed for trajectory in by_env[env])
        click.echo(f"{env} {split}: {len(by_env[env])} episodes, {failed} failed")
        for result in found:
            click.echo(_as_line(result))


def _as_line(result: StratumResult) -> str:
    best = "  ".join(f"pass@{k} {v.mean:.3f}" for k, v in result.pass_at_k.items() if k > 1)
    line = f"  {result.stratum:18} {result.success}  {result.num_tasks:5} tasks  {best}"
    return line.rstrip()


def _as_json(result: StratumResult) -> dict[str, Any]:
    success = result.success
    return {
        "stratum": result.stratum,
        "tasks": result.num_tasks,
        "samples": result.num_samples,
        "failed": result.num_failed,
        "success": {"mean": success.mean, "low": success.low, "high": success.high},
        "pass_at_k": {str(k): v.mean for k, v in result.pass_at_k.items()},
        "reward": result.reward.mean,
        "turns": result.turns_mean,
        "response_tokens": result.response_tokens_mean,
    }
