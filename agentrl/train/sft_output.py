"""Where supervised training writes: opened, resumed, and completed at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from agentrl.dist.engine import TrainEngine
from agentrl.errors import CheckpointError
from agentrl.telemetry.files import filling
from agentrl.telemetry.run_dir import RunDir
from agentrl.telemetry.tracker import TrackedRun, Tracker, build_trackers
from agentrl.train.checkpoint import CheckpointStore
from agentrl.train.rng_state import restore_rng
from agentrl.train.settings import changed_settings
from agentrl.train.sft_config import FOLDER, LAST_FILE
from agentrl.train.sft_engine import ROLE

_FREE = ("sft.eval_every", "sft.save_every", "sft.cluster", "sft.address", "sft.start_timeout_s")
_FREE += ("sft.grace_s",)
_FREE += ("sft.ranks", "sft.gpus_per_rank", "sft.shard_size", "sft.sequence_parallel")
_FREE += ("sft.tokens_per_micro_batch", "sft.recompute", "sft.compile")
_FREE += ("sandbox.max_open", "sandbox.create_timeout_s", "tools.breaker.")
"""Settings that may change on a resume: they decide where and how fast, not what is learned."""
_WRITTEN = {
    "env.id": "--env",
    "model.path": "--model",
    "model.weights": "what lies at --model (a digest of its weights)",
    "data.train": "the digest of the conversations to learn",
    "data.val": "the digest of the conversations held out",
    "trainer.total_steps": "the number of steps",
}
"""Stored key -> how a user knows it."""


@contextmanager
def open_output(out: Path, resume: bool) -> Iterator[RunDir]:
    """Hold the lock of ``OUT/sft``; a start that is refused leaves nothing behind."""
    run = RunDir.resume(out / FOLDER) if resume else RunDir.create(out / FOLDER)
    try:
        yield run
    finally:
        run.close()
        run.remove_if_empty()
        if not run.path.is_dir() and out.is_dir() and not any(out.iterdir()):
            out.rmdir()


def restore_sft(store: CheckpointStore, engine: TrainEngine, config: Mapping[str, Any]) -> int:
    """Load the newest sound checkpoint; return its step, 0 where a run never came to one."""
    checkpoint = store.load_latest()
    if checkpoint is None:
        return 0
    if changed := changed_settings(checkpoint.config, config, free=_FREE):
        listed = "; ".join(
            f"{_as_written(key)} was {old!r} and is now {new!r}"
            for key, (old, new) in changed.items()
        )
        raise CheckpointError(
            f"the checkpoint was made with other settings: {listed}. Use the old ones, or train "
            "into another --out"
        )
    engine.load(checkpoint.of_engine(ROLE))
    restore_rng(checkpoint.rng)
    return checkpoint.step


def _as_written(key: str) -> str:
    """Return what a user changes to change a stored setting."""
    return _WRITTEN.get(key, key.removeprefix("sft."))


def digest_of_start(engine: TrainEngine) -> str:
    """Return a digest of every weight that adapters are attached to, 32 hexadecimal digits.

    Checkpoints hold adapters alone, and a path says nothing of the weights that lie there.

    Args:
        engine: with adapters that were not trained yet: merged, they add nothing.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, value in engine.export_params():
        plain = value.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def export_whole(engine: TrainEngine, out: Path) -> None:
    """Put the model in place: complete, or without the file that makes a directory a model."""
    with filling(out, last=(LAST_FILE,)) as writing:
        engine.export_pretrained(writing)


def sft_tracker(run: RunDir, total_steps: int, *, keep: int | None) -> closing[Tracker]:
    """Return what writes ``metrics.jsonl``.

    Args:
        keep: on a resume the last step whose line stays; None for a new run.
    """
    followed = TrackedRun(
        directory=run.path,
        name=run.path.parent.name,
        total_steps=total_steps,
        keep_through_step=None if keep is None else (keep or -1),
    )
    return closing(build_trackers(["jsonl"], followed))
