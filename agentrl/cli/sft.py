"""`agentrl sft`."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import click

from agentrl.cli.json_output import json_option, print_json
from agentrl.cli.options import env_option, overrides_argument, prepare_process


@click.command("sft")
@env_option
@click.option("--data", metavar="FILE", help="Conversations: .jsonl, .parquet, hf:NAME.")
@click.option("--val", metavar="FILE", help="Held-out conversations; default: a tenth of --data.")
@click.option("--model", required=True, help="A hub id, a directory, a .gguf file, or 'tiny'.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where to write.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --out.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@json_option
@overrides_argument
def command(
    env_id: str | None,
    data: str | None,
    val: str | None,
    model: str,
    out: Path,
    resume: bool,
    quiet: bool,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Fine-tune on an environment's demonstrations (--env) or on conversations (--data).

    The loss is on what assistants said, nothing else. A row of --data is
    {"messages": [...], "tools": [...]}; settings are those of supervised training, for example
    steps=200 lr=1e-4. With --env those of env, sandbox and tools say how demonstrations are played,
    as for `agentrl train`; env.mix in place of --env takes several environments.

    \b
    agentrl sft --env code_sandbox --model tiny --out warm steps=800
    agentrl sft --env code_sandbox --model tiny --out warm env.kwargs.level=2 sandbox.id=docker
    agentrl sft --data chats.jsonl --model Qwen/Qwen3-0.6B --out tuned lr=1e-5 epochs=2
    agentrl sft --data chats.jsonl --model Qwen/Qwen3-0.6B --out tuned cluster=ray ranks=2
    """
    from agentrl.sft_start import part_settings, refuse_start, sft_settings, sft_sources

    training, playing = part_settings(overrides)
    settings = sft_settings(training)
    sources = sft_sources(env_id=env_id, data=data, val=val, playing=playing)
    refuse_start(sources, out=out, resume=resume)
    prepare_process(0)
    from agentrl.errors import Interrupted
    from agentrl.sft import fine_tune
    from agentrl.train.preemption import going_on
    from agentrl.train.sft import SAME_COMMAND
    from agentrl.train.sft_config import FOLDER

    work = fine_tune(settings, sources, model=model, out=out, resume=resume, quiet=quiet)
    try:
        facts = asyncio.run(work)
    except KeyboardInterrupt:
        run = out / FOLDER
        if not run.is_dir():  # a start that wrote nothing, and leaves nothing behind
            raise
        raise Interrupted(f"stopped by Ctrl-C; {going_on(run, SAME_COMMAND)}") from None
    if as_json:
        print_json(facts)
        return
    for key, value in facts.items():
        click.echo(f"{key:18} {value:.4g}" if isinstance(value, float) else f"{key:18} {value}")
    path = shlex.quote(str(out))
    chosen = [] if env_id is None else ["--env", env_id]
    env = shlex.join([*chosen, *playing]) or "--env ENV"
    click.echo(f"model: {out}")
    click.echo(f"measure it: agentrl eval {env} --model {path} -n 8")
    click.echo(f"train it further: agentrl train {env} model.path={path}")
