"""Supervised fine-tuning of any model: what `agentrl sft` does.

::

    OUT/                      the model, as AutoModelForCausalLM loads it; complete or absent
    OUT/sft/config.yaml       settings
           /metrics.jsonl     one JSON object a step
           /memory_plan.json  what it was to take
           /report.html       curves
           /checkpoints/      to resume from: the newest
           /start/            the embedded model before training
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from agentrl.agent.renderer import Renderer
from agentrl.dist.config import COMPILES
from agentrl.errors import ConfigError, Preempted
from agentrl.memory_plan import keep_plan, plan_training, show_plan
from agentrl.model.describe import model_config
from agentrl.model.load import load_tokenizer, quiet_transformers
from agentrl.model.tiny import DEFAULT_VOCAB_SIZE
from agentrl.sandbox.opening import open_sandboxes
from agentrl.sft_start import DemonstrationSource, SFTSources, refuse_start
from agentrl.telemetry.run_dir import RunDir
from agentrl.train.checkpoint import CheckpointStore
from agentrl.train.config import TINY
from agentrl.train.environments import make_environments, refuse_idle_specs
from agentrl.train.interruption import interruptible
from agentrl.train.open_model import warm_start_progress
from agentrl.train.preemption import going_on, stop_on_sigterm
from agentrl.train.sft import SAME_COMMAND, SFTResult, SFTStep, run_sft
from agentrl.train.sft_config import SFTConfig
from agentrl.train.sft_data import (
    ChatExample,
    ConversationColumns,
    EncodedExamples,
    encode_examples,
    load_conversations,
)
from agentrl.train.sft_engine import ROLE, open_engine
from agentrl.train.sft_output import (
    digest_of_start,
    export_whole,
    open_output,
    restore_sft,
    sft_tracker,
)
from agentrl.train.warm_start import Report, collect_splits, fresh_tiny

_START = "start"
_NUM_VALIDATION = 256


async def fine_tune(
    settings: SFTConfig,
    sources: SFTSources,
    *,
    model: str,
    out: Path,
    resume: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train ``model`` on demonstrations of an environment or on conversations of a file.

    Writes a directory that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load.

    Args:
        resume: go on from the newest checkpoint in ``out``.
        quiet: show nothing.

    Returns:
        Losses, sizes and seconds.

    Raises:
        ConfigError: neither or both sources, or ``out`` is a file or not empty.
        DataError, EnvError, ModelError: the source or the model cannot be used.
        SandboxUnavailable: demonstrations are played in sandboxes, which cannot work here.
        MemoryPlanError: it takes more memory than there is.
        CheckpointError: there is nothing to resume, or it belongs to other settings or data.
        Preempted: SIGTERM came; what was learned is saved.
    """
    refuse_start(sources, out=out, resume=resume)
    if model != TINY:
        model_config(model)  # rather now than after an hour of demonstrations
    with warm_start_progress(quiet) as show, open_output(out.absolute(), resume) as run:
        examples = (
            await _demonstrations(settings, sources.demonstrations, show.report)
            if sources.demonstrations is not None
            else _from_files(settings, sources)
        )
        args = settings, sources, model, examples, run, resume, quiet, show.report
        return await interruptible(partial(_tune, *args))


def _tune(
    settings: SFTConfig,
    sources: SFTSources,
    model: str,
    examples: dict[str, list[ChatExample]],
    run: RunDir,
    resume: bool,
    quiet: bool,
    report: Report,
) -> dict[str, Any]:
    path = _start_of(settings, examples["train"], run) if model == TINY else model
    memory = plan_training(
        path,
        settings.engine_config(),
        settings.lora,
        settings.pool(),
        longest_row=settings.max_tokens,
    )
    show_plan(memory, quiet=quiet)
    if settings.compile and not quiet:
        Console(stderr=True).print(COMPILES, highlight=False, soft_wrap=True)
    train, held_out = _encoded(settings, load_tokenizer(path), examples)
    total = settings.num_steps(len(train.examples))
    if problems := list(settings.warmup_problems(total)):
        raise ConfigError("\n".join(problems))
    config = _plain(
        {
            "sft": asdict(settings),
            "model": {"path": model},
            "data": {"train": train.digest(), "val": held_out.digest()},
            "trainer": {"total_steps": total},
            **(asdict(sources.demonstrations) if sources.demonstrations else {}),
        }
    )
    with ExitStack() as stack:
        engine = stack.enter_context(open_engine(settings, path, total_steps=total))
        if settings.lora.rank:
            config["model"]["weights"] = digest_of_start(engine)
        store = CheckpointStore(run.checkpoints_path, config=config, keep_last=1, keep_best=False)
        stack.callback(store.close)
        done = restore_sft(store, engine, config) if resume else 0
        run.write_config(yaml.safe_dump(config, sort_keys=False))
        keep_plan(memory, run.path)
        tracker = stack.enter_context(sft_tracker(run, total, keep=done if resume else None))

        def on_step(step: SFTStep) -> None:
            tracker.log(step.metrics(), step.step)
            report("sft", step.step, step.total_steps, step.loss)

        def save(step: SFTStep) -> None:
            store.save(step.step, {ROLE: engine}, {"step": step.step}, score=None)

        asked: list[str] = []
        try:
            with stop_on_sigterm(
                asked.append,
                grace_s=settings.grace_s,
                setting="grace_s",
                how_to_go_on=partial(going_on, run.path, SAME_COMMAND),
                at_once=True,  # the event loop does not turn while this trains
            ):
                result = run_sft(
                    settings,
                    engine,
                    train.examples,
                    validation=held_out.examples,
                    first_step=done + 1,
                    on_step=on_step,
                    save=save,
                    stop_reason=lambda: "".join(asked),
                )
        except Preempted:
            store.flush()
            raise
        store.flush()
        export_whole(engine, run.path.parent)
    _write_report(run)
    return _facts(result, num_too_long=train.num_too_long + held_out.num_too_long)


# ---------------------------------------------------------------------- conversations


def _from_files(settings: SFTConfig, sources: SFTSources) -> dict[str, list[ChatExample]]:
    """Read the files; without one for validation keep every tenth conversation for it.

    A lone conversation serves both.
    """
    assert sources.data is not None
    columns = ConversationColumns(messages=settings.messages_column, tools=settings.tools_column)
    conversations = load_conversations(sources.data, columns=columns)
    if sources.val is not None:
        held_out = load_conversations(sources.val, key="--val", columns=columns)
        return {"train": conversations, "val": held_out}
    held_out = conversations[::10][:_NUM_VALIDATION]
    kept = {id(example) for example in held_out}
    train = [example for example in conversations if id(example) not in kept] or conversations
    return {"train": train, "val": held_out}


async def _demonstrations(
    settings: SFTConfig, source: DemonstrationSource, report: Report
) -> dict[str, list[ChatExample]]:
    environments = make_environments(source.env, source.tools)
    refuse_idle_specs(environments, source.tools.specs)
    async with open_sandboxes(source.sandbox) as sandboxes:
        return await collect_splits(settings, environments, sandboxes=sandboxes, report=report)


def _encoded(
    settings: SFTConfig, tokenizer: Any, examples: dict[str, list[ChatExample]]
) -> list[EncodedExamples]:
    renderer = Renderer(tokenizer)
    return [
        encode_examples(
            renderer, examples[split], max_tokens=settings.max_tokens, turns=settings.turns
        )
        for split in ("train", "val")
    ]


def _start_of(settings: SFTConfig, examples: Sequence[ChatExample], run: RunDir) -> str:
    """Return where the embedded model lies before training; made once, also for a resume."""
    folder = run.path / _START
    if not folder.is_dir():
        start = fresh_tiny(examples, vocab_size=DEFAULT_VOCAB_SIZE, seed=settings.seed)
        writing = run.path / f".writing-{_START}"
        shutil.rmtree(writing, ignore_errors=True)  # of a start that was killed
        with quiet_transformers():
            start.tokenizer.save_pretrained(writing)
            start.model.save_pretrained(writing)
        writing.rename(folder)
    return str(folder)


def _write_report(run: RunDir) -> None:
    from agentrl.telemetry.report import render_report

    render_report(run)


def _facts(result: SFTResult, *, num_too_long: int) -> dict[str, Any]:
    return {
        "first_loss": result.losses[0],
        "last_loss": result.losses[-1],
        "validation_loss": result.validation_loss,
        "steps": len(result.losses),
        "num_tokens": result.num_tokens,
        "num_too_long": num_too_long,
        "sft_s": result.seconds,
    }


def _plain(value: Any) -> Any:
    """Return settings as YAML and checkpoints hold them."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str) else value
