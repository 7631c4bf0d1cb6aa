"""`agentrl bench`: rollout, sync, step."""

from __future__ import annotations

import asyncio
import shlex
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from agentrl.cli.json_output import json_option, print_json
from agentrl.cli.options import overrides_argument, prepare_process

if TYPE_CHECKING:
    from agentrl.testing.decode_time import Device

F = TypeVar("F", bound=Callable[..., Any])

_SHAPES = "tiny, small, qwen2.5-0.5b, qwen3-1.7b"
_COUNT, _COUNT_OR_NONE = click.IntRange(min=1), click.IntRange(min=0)

threads_option = click.option(
    "--threads",
    type=click.IntRange(min=0, max=1024),
    default=0,
    show_default=True,
    help="Torch threads; 0 takes the number of cores.",
)


@click.group("bench")
def command() -> None:
    """Measure rollouts, weight syncs and whole steps.

    Arms are taken in turn (A B B A), medians stand between the shortest and the longest time, and
    beside each is the least that the work could take on this machine.
    """


def work_options(**defaults: Any) -> Callable[[F], F]:
    """Take what is sampled: shape, counts, lengths, latencies."""
    options = {
        "shape": ("tiny", f"Random weights in this shape: {_SHAPES}."),
        "prompts": (8, "Prompts of a step."),
        "samples": (4, "Samples per prompt."),
        "prompt-tokens": (64, "Of the first prompt, template included."),
        "turns": (1, "Of an episode."),
        "turn-tokens": (32, "Sampled in a turn, exactly (in `rollout`: at most)."),
        "answer-tokens": (0, "Letters that the environment says between turns."),
        "latency-median-s": (0.0, "Of the environment, in every turn."),
        "latency-p99-s": (0.0, "Of the environment, in every turn."),
    }

    def decorate(function: F) -> F:
        for name, (default, text) in reversed(options.items()):
            default = defaults.get(name.replace("-", "_"), default)
            function = click.option(f"--{name}", default=default, show_default=True, help=text)(
                function
            )
        return function

    return decorate


@command.command("rollout")
@work_options(turns=4, turn_tokens=128, answer_tokens=16, latency_median_s=0.2, latency_p99_s=5.0)
@click.option(
    "--batch",
    type=_COUNT,
    default=16,
    show_default=True,
    help="Requests of a call, in arm `batch`.",
)
@click.option("--repeats", type=_COUNT, default=5, show_default=True)
@threads_option
@json_option
@overrides_argument
def rollout(
    batch: int, repeats: int, threads: int, as_json: bool, overrides: tuple[str, ...], **work: Any
) -> None:
    """Play the same episodes in fixed batches, with a barrier per turn, and each by itself.

    Settings after the options choose the engine.

    \b
    agentrl bench rollout
    agentrl bench rollout --shape qwen2.5-0.5b --prompts 64 --batch 64 rollout=vllm
    """
    prepare_process(threads)
    from agentrl.bench.fixed_work import FixedWork
    from agentrl.bench.machine import refuse_busy_gpu
    from agentrl.bench.results import table
    from agentrl.bench.rollout import HEADERS, measure_rollouts, rows

    asked = FixedWork(**work)
    refuse_busy_gpu()
    ceilings = _ceilings()
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        policy = Path(folder, "policy")
        shape = asked.write(policy)
        arms, floor_s = asyncio.run(
            measure_rollouts(
                asked,
                policy,
                settings=overrides,
                batch=batch,
                repeats=repeats,
                shape=shape,
                device=ceilings,
                announce=_tell,
            )
        )
    found = {"arms": [asdict(arm) for arm in arms], "floor_s": floor_s}
    _show(
        as_json,
        found,
        ceilings,
        {**work, "batch": batch, "settings": overrides},
        [table(HEADERS, rows(arms, floor_s))],
    )


@command.command("sync")
@click.option("--shape", default="small", show_default=True, help=f"{_SHAPES}.")
@click.option("--device", default=None, help="cpu or cuda; CUDA where there is one.")
@click.option("--arms", default="", help="Names, with commas between them; all unless given.")
@click.option("--bucket-mb", type=_COUNT, default=64, show_default=True)
@click.option("--lr", default=1e-6, show_default=True, help="Of the optimizer between syncs.")
@click.option("--repeats", type=_COUNT, default=5, show_default=True)
@threads_option
@json_option
def sync(
    shape: str,
    device: str | None,
    arms: str,
    bucket_mb: int,
    lr: float,
    repeats: int,
    threads: int,
    as_json: bool,
) -> None:
    """Send trained weights to another process, by transport, until checksums are compared.

    \b
    agentrl bench sync
    agentrl bench sync --shape qwen3-1.7b --arms cuda_ipc,tensors
    """
    prepare_process(threads)
    import torch

    from agentrl.bench.machine import refuse_busy_gpu
    from agentrl.bench.results import table
    from agentrl.bench.sync import HEADERS, measure_syncs, rows
    from agentrl.bench.sync_arms import SyncSettings

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = SyncSettings(shape=shape, device=chosen, bucket_mb=bucket_mb, lr=lr)
    refuse_busy_gpu()
    ceilings = _ceilings()
    wanted = [name for name in arms.split(",") if name]
    result = measure_syncs(settings, repeats=repeats, wanted=wanted, announce=_tell)
    lines = [f"{result.num_bytes / 1e6:.0f} MB in {result.num_buckets} buckets"]
    if result.changed_share is not None:
        lines.append(f"{result.changed_share:.2%} of the elements change in a step of lr={lr:g}")
    _show(
        as_json, asdict(result), ceilings, asdict(settings), [*lines, table(HEADERS, rows(result))]
    )


@command.command("step")
@work_options()
@click.option(
    "--steps", type=_COUNT, default=5, show_default=True, help="Measured, of every run of an arm."
)
@click.option(
    "--warmup", type=_COUNT_OR_NONE, default=2, show_default=True, help="Steps before them."
)
@click.option(
    "--arm",
    "arm_texts",
    multiple=True,
    metavar="NAME:SETTINGS",
    help="A way to run the step; may be given several times. Without any: one, as it is.",
)
@click.option("--repeats", type=_COUNT, default=1, show_default=True, help="Runs of every arm.")
@threads_option
@json_option
@overrides_argument
def step(
    steps: int,
    warmup: int,
    arm_texts: tuple[str, ...],
    repeats: int,
    threads: int,
    as_json: bool,
    overrides: tuple[str, ...],
    **work: Any,
) -> None:
    """Train steps of fixed work and say whose every second was.

    The run is that of `agentrl train`; settings after the options are its settings.

    \b
    agentrl bench step
    agentrl bench step --shape qwen2.5-0.5b --prompts 64 --samples 8 --prompt-tokens 512
      --turn-tokens 512 --arm one:rollout.replicas_per_gpu=1 --arm two:rollout.replicas_per_gpu=2
      --repeats 2 rollout=vllm trainer.deterministic=false
    """
    prepare_process(threads)
    from agentrl.bench.fixed_work import FixedWork
    from agentrl.bench.machine import refuse_busy_gpu
    from agentrl.bench.phases import MAX_OTHER
    from agentrl.bench.results import interleaved, table
    from agentrl.bench.step import HEADERS, StepResult, measure_steps, rows, step_floor

    asked = FixedWork(**work)
    arms = _arms(arm_texts)
    refuse_busy_gpu()
    ceilings = _ceilings()
    results = {name: StepResult(arm=name) for name in arms}
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        policy = Path(folder, "policy")
        shape = asked.write(policy)
        for name in interleaved(list(arms), repeats):
            found = asyncio.run(
                measure_steps(
                    asked,
                    policy,
                    arm=name,
                    settings=[*overrides, *arms[name]],
                    steps=steps,
                    warmup=warmup,
                    announce=_tell,
                )
            )
            results[name].extend(found)
    floor = step_floor(asked, shape, ceilings)
    for result in results.values():
        if result.unowned > MAX_OTHER:
            _tell(
                f"{result.arm}: {result.unowned:.1%} of the time has no owner, at most "
                f"{MAX_OTHER:.0%} should: the steps are very short, or something lacks a span"
            )
    tables = [
        f"{result.arm}: {result.sampled_tokens[0]:,} tokens sampled, "
        f"{result.context_tokens[0]:,} trained on, {len(result.steps)} steps\n"
        + table(HEADERS, rows(result, floor))
        for result in results.values()
    ]
    measured = {"arms": [asdict(result) for result in results.values()], "floor_s": floor}
    asked_of = {**work, "settings": overrides, "arms": arms}
    _show(as_json, measured, ceilings, asked_of, tables)


def _arms(texts: tuple[str, ...]) -> dict[str, list[str]]:
    """Read ``name:key=value key=value``."""
    arms: dict[str, list[str]] = {}
    for text in texts:
        name, colon, settings = text.partition(":")
        if not (name and colon) or name in arms:
            raise click.BadParameter(
                f"{text!r}: write NAME:KEY=VALUE, with names that differ", param_hint="--arm"
            )
        try:
            arms[name] = shlex.split(settings)
        except ValueError as error:  # a quotation without an end
            raise click.BadParameter(f"{text!r}: {error}", param_hint="--arm") from None
    return arms or {"agentrl": []}


def _ceilings() -> Device:
    from agentrl.bench.machine import measure_ceilings

    return measure_ceilings()


def _tell(text: str) -> None:
    click.echo(text, err=True)


def _show(
    as_json: bool, found: Any, ceilings: Device, asked: dict[str, Any], tables: list[str]
) -> None:
    from agentrl.bench.machine import describe_machine

    machine = describe_machine()
    if as_json:
        whole = {"asked": asked, "machine": machine, "ceilings": asdict(ceilings), "found": found}
        print_json(whole)
        return
    for name, value in machine.items():
        click.echo(f"{name:13} {value}")
    click.echo(
        f"{'ceilings':13} {ceilings.bytes_per_s / 1e9:,.0f} GB/s read, "
        f"{ceilings.flops_per_s / 1e12:.3g} TFLOP/s\n"
    )
    click.echo("\n\n".join(tables))
