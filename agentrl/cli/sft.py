"""`agentrl sft`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from agentrl.cli.options import env_option, overrides_argument, prepare_process


@click.command("sft")
@env_option
@click.option("--data", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", required=True, help="A hub id, a directory, a .gguf file, or 'tiny'.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where to write.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@overrides_argument
def command(
    env_id: str | None,
    data: Path | None,
    model: str,
    out: Path,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Fine-tune on an environment's demonstrations (--env) or on conversations (--data).

    The loss is on what assistants said, nothing else. A line of --data is
    {"messages": [...], "tools": [...]}; settings are those of supervised training, for example
    steps=200 lr=1e-4.

    \b
    agentrl sft --env code_sandbox --model tiny --out warm steps=800
    agentrl sft --data chats.jsonl --model Qwen/Qwen3-0.6B --out tuned lr=1e-5
    """
    from agentrl.sft import fine_tune, sft_settings

    settings = sft_settings(overrides)
    prepare_process(0)
    facts = asyncio.run(fine_tune(settings, env_id=env_id, data=data, model=model, out=out))
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        click.echo(f"{key:18} {value}")
