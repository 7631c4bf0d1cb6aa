"""From ``model.path`` to a model and its tokenizer, whatever it names."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from agentrl.dist.config import LoraConfig
from agentrl.dist.engine import TrainEngine
from agentrl.dist.lora import Adapters, attach_adapters, is_adapter
from agentrl.dist.sharded_state import load_full
from agentrl.dist.train_state import MODEL_PREFIX
from agentrl.errors import CheckpointError, ConfigError
from agentrl.model.load import (
    LoadedModel,
    load_model,
    load_tokenizer,
    load_with_weights,
    resolve_device,
)
from agentrl.sandbox.base import SandboxProvider
from agentrl.train.checkpoint import Checkpoint, CheckpointStore
from agentrl.train.config import TINY, ModelConfig
from agentrl.train.environments import Environment
from agentrl.train.seal import refuse_damaged, seal
from agentrl.train.warm_start import warm_start

_LINE_EVERY_S = 10.0
MODEL_FOLDER = "model"
"""In a run directory: configuration and tokenizer, which with a checkpoint make a model."""
_ADAPTED = "what the adapters of the run are attached to (lora.rank)"
_STAGES = {
    "demonstrations": "collecting demonstrations",
    "tokenizer": "training the tokenizer",
    "sft": "supervised training",
}


async def open_model(
    config: ModelConfig,
    environments: Sequence[Environment],
    *,
    sandboxes: SandboxProvider,
    quiet: bool = False,
) -> LoadedModel:
    """Load a model; the embedded one is made first where it is not cached.

    Raises:
        ModelError: nothing that can be loaded stands at ``config.path``.
        CheckpointError: it is a run directory without a sound checkpoint.
        EnvError: ``tiny`` for an environment without demonstrations; says what to do.
        ConfigError: there is no such device.
    """
    resolve_device(config.device)  # before the embedded model is made for it
    if config.path == TINY:
        with warm_start_progress(quiet) as show:
            start = await warm_start(
                config.warm_start,
                environments,
                sandboxes=sandboxes,
                report=show.report,
            )
        return load_model(str(start.path), device=config.device)
    if is_run(config.path):
        return await asyncio.to_thread(
            open_run_model,
            Path(config.path),
            device=config.device,
            chat_template=config.chat_template,
        )
    return await asyncio.to_thread(
        load_model, config.path, device=config.device, chat_template=config.chat_template
    )


def is_run(path: str) -> bool:
    """Whether ``path`` is a run directory."""
    return run_config_path(path).is_file() and (Path(path) / MODEL_FOLDER).is_dir()


def run_config_path(run: str) -> Path:
    """Return where a run keeps its resolved configuration."""
    return Path(run) / "config.yaml"


def open_run_model(
    run: Path,
    *,
    device: str = "auto",
    step: int | None = None,
    best: bool = False,
    chat_template: str | None = None,
) -> LoadedModel:
    """Return the policy of a run, of the newest sound checkpoint unless told otherwise.

    Any number of ranks may have saved it.

    Args:
        step: take the checkpoint of this step.
        best: take the one with the best success on held-out tasks.
        chat_template: a jinja file that replaces the template of the run.

    Raises:
        CheckpointError: there is none.
    """
    checkpoint = _choose(run, step=step, best=best)
    weights = _policy_weights(checkpoint)
    if any(map(is_adapter, weights)):
        weights = dict(_adapted(run, checkpoint, weights).merged(_itself))
    loaded = load_with_weights(
        run / MODEL_FOLDER, weights, device=device, chat_template=chat_template
    )
    return replace(loaded, source=f"{run} step {checkpoint.step}")


def export_adapters(run: Path, out: Path, *, step: int | None = None, best: bool = False) -> str:
    """Write the adapters of a run, and its tokenizer, as peft loads them; returns their source.

    Args:
        out: made where it is not there.
        step, best: as of :func:`open_run_model`.

    Raises:
        CheckpointError: there is no such checkpoint.
        ConfigError: the run trained all weights.
    """
    checkpoint = _choose(run, step=step, best=best)
    weights = _policy_weights(checkpoint)
    if not any(map(is_adapter, weights)):
        raise ConfigError(
            f"the run {str(run)!r} trained all weights (lora.rank=0), so it has no adapters; leave "
            "--adapters out to export its policy"
        )
    path = str(checkpoint.config["model"]["path"])
    base = str((run / MODEL_FOLDER).absolute()) if path == TINY or is_run(path) else path
    adapters = _adapted(run, checkpoint, weights, source=base)
    adapters.save(out, dict(adapters.tensors(_itself)))
    load_tokenizer(str(run / MODEL_FOLDER)).save_pretrained(out)
    return f"{run} step {checkpoint.step}"


def _choose(run: Path, *, step: int | None, best: bool) -> Checkpoint:
    store = CheckpointStore.of_run(run)
    if best and (step := store.best_step()) is None:
        raise CheckpointError(
            f"no checkpoint of the run {str(run)!r} was measured on the validation split (val), so "
            "none is the best; leave --best out for the newest, or name one with --step. In the "
            "next run let trainer.save_every and trainer.eval_every meet"
        )
    if step is not None and step not in (steps := store.steps()):
        there = f"it has: {', '.join(map(str, steps))}" if steps else "it has none yet"
        raise CheckpointError(f"the run {str(run)!r} has no checkpoint of step {step}; {there}")
    checkpoint = store.load_latest() if step is None else store.load(step)
    if checkpoint is None:
        raise CheckpointError(f"the run {str(run)!r} has no checkpoint yet: nothing to load")
    return checkpoint


def _policy_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return load_full(checkpoint.of_engine("actor"), prefix=MODEL_PREFIX)


def keep_model_files(
    model: LoadedModel, run: Path, *, frozen: TrainEngine | None = None, trained: bool = False
) -> None:
    """Write into a run directory what its checkpoints lack, so that it stands alone.

    That is configuration and tokenizer, once.

    Args:
        frozen: of a run that trains adapters: what they are attached to is written as well.
        trained: the run goes on from a checkpoint, so ``frozen`` holds what it has learned.

    Raises:
        CheckpointError: the directory of a run that has trained adapters is gone.
    """
    folder = run / MODEL_FOLDER
    if folder.is_dir():
        return
    if frozen is not None and trained:  # merged into what is kept, adapters would count twice
        refuse_damaged(folder, what=_ADAPTED)
    writing = run / f".writing-{MODEL_FOLDER}"
    shutil.rmtree(writing, ignore_errors=True)  # of a start that was killed
    writing.mkdir()
    if frozen is not None:  # adapters that were not trained yet add nothing
        frozen.export_pretrained(writing)
        seal(writing)
    else:
        model.model.config.save_pretrained(writing)
        model.tokenizer.save_pretrained(writing)
    writing.rename(folder)


def base_of_adapters(run: Path) -> Path | None:
    """Return the folder of what a run's adapters are attached to; None where it was not written.

    Raises:
        CheckpointError: it is damaged.
    """
    folder = run / MODEL_FOLDER
    if not any(folder.glob("*.safetensors")):
        return None
    refuse_damaged(folder, what=_ADAPTED)
    return folder


def _adapted(
    run: Path, checkpoint: Checkpoint, adapters: Mapping[str, Tensor], *, source: str = ""
) -> Adapters:
    """Return the frozen model of a run with the adapters of a checkpoint attached.

    Raises:
        CheckpointError: it is damaged, or the adapters are those of another model.
    """
    folder = base_of_adapters(run)
    if folder is None:
        raise CheckpointError(
            f"{str(run / MODEL_FOLDER)!r} has no weights, so there is nothing that the adapters of "
            "the checkpoint could be attached to; restore the directory"
        )
    config = LoraConfig(**checkpoint.config["lora"])
    model = load_model(str(folder), device="cpu").model
    attached = attach_adapters(model, config, seed=0, source=source)
    own = dict(attached.tensors(_itself))
    found = {name: adapters[name].shape for name in adapters if is_adapter(name)}
    if found != {name: value.shape for name, value in own.items()}:
        raise CheckpointError(
            f"the adapters of the checkpoint are not those of the model in {str(folder)!r} under "
            f"lora.rank={config.rank}, lora.target_modules={config.target_modules!r}: was one of "
            "the two replaced?"
        )
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(adapters[name])
    return attached


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class _Show(Protocol):
    def report(self, stage: str, done: int, total: int, loss: float | None = None) -> None: ...


class _Bars:
    """Progress of a warm start on a terminal, a bar per stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._bars: dict[str, Any] = {}

    def report(self, stage: str, done: int, total: int, loss: float | None = None) -> None:
        """Update the bar of ``stage``."""
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(_STAGES[stage], total=total, note="")
        note = "" if loss is None else f"loss {loss:.3f}"
        self._progress.update(self._bars[stage], completed=done, total=total, note=note)


class ProgressLines:
    """The same where the output is no terminal: a plain line every ten seconds, and at the end.

    Args:
        write: takes a line.
        clock: seconds on a monotonic clock.
    """

    def __init__(
        self, write: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write, self._clock = write, clock
        self._last = clock()

    def report(self, stage: str, done: int, total: int, loss: float | None = None) -> None:
        """Write a line where one is due."""
        if done < total and self._clock() - self._last < _LINE_EVERY_S:
            return
        self._last = self._clock()
        note = "" if loss is None else f"  loss {loss:.3f}"
        self._write(f"{_STAGES[stage]} {done}/{total}{note}")


@contextmanager
def warm_start_progress(quiet: bool) -> Iterator[_Show]:
    """Show bars, or lines where that is no terminal, on standard error while the block runs."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        write = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        yield ProgressLines((lambda _: None) if quiet else write)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield _Bars(progress)
