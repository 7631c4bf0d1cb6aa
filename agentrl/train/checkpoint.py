"""Checkpoints of a run: atomic, checksummed, complete or absent.

::

    checkpoints/step_000010/manifest.json        size and BLAKE2 of every other file
                            state.json           progress, generators, configuration, versions
                            tensors.safetensors  tensors among them
                            actor/, critic/      what the engine of that role saved, rank by rank
                            waiting/             groups that were sampled ahead, if any

A checkpoint is written in the background under another name, forced to disk and then renamed, so a
run that is killed leaves the previous ones as they were. Loading compares every checksum first; a
damaged checkpoint is named, and the newest sound one before it is used.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from agentrl.dist.engine import PendingSave
from agentrl.dist.sharded_state import sync_to_disk
from agentrl.errors import CheckpointError
from agentrl.train.manifest import read_manifest, step_name, step_of, verify, write_manifest
from agentrl.train.provenance import provenance
from agentrl.train.rng_state import capture_rng
from agentrl.train.state_file import EncodedState, encode_state, read_state

logger = logging.getLogger(__name__)

_HIDDEN = (".writing-", ".deleting-")


class Part(Protocol):
    """A part of a run with a state of its own: a training engine, groups that wait."""

    def save(self, directory: Path) -> PendingSave:
        """Write it into ``directory``, which exists; returns once the state is copied."""
        ...


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """What a run is resumed from."""

    path: Path
    """An engine of a role loads what it saved from :meth:`of_engine`."""
    step: int
    score: float | None
    """Success on held-out tasks at this step, where it was measured."""
    progress: dict[str, Any]
    """Where the run stands, as the trainer saved it."""
    rng: dict[str, Any]
    """For :func:`~agentrl.train.rng_state.restore_rng`."""
    config: dict[str, Any]
    """Resolved configuration of the run that saved it."""
    versions: dict[str, str]
    """Of agentrl and the libraries that decide numbers."""
    damaged: list[str] = field(default_factory=list)
    """Newer checkpoints that were passed over, each with what is wrong with it."""

    def of_engine(self, role: str) -> Path:
        """Return where the engine of a role saved its state.

        Raises:
            CheckpointError: there was no such engine.
        """
        if not (self.path / role).is_dir():
            raise CheckpointError(
                f"the checkpoint {str(self.path)!r} has no state of the role {role!r}: the run "
                "that saved it had none; resume it with the settings it began with"
            )
        return self.path / role


class CheckpointStore:
    """The ``checkpoints`` directory of one run. One process writes; any may read.

    One save at a time is under way: a second waits for it.

    Args:
        directory: created at the first save; all ranks see it.
        config: resolved configuration of the run, stored with every checkpoint.
        keep_last: complete checkpoints to keep, at least 1.
        keep_best: keep the one with the best score as well, however old.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config: Mapping[str, Any],
        keep_last: int = 2,
        keep_best: bool = True,
    ) -> None:
        self.directory = directory
        self._config = dict(config)
        self._keep_last = max(keep_last, 1)
        self._keep_best = keep_best
        self._saving: Future[None] | None = None

    @classmethod
    def of_run(cls, run: Path) -> CheckpointStore:
        """Return the store of a run directory, to read from."""
        return cls(run / "checkpoints", config={})

    # ------------------------------------------------------------------ writing

    def save(
        self,
        step: int,
        parts: Mapping[str, Part],
        progress: Mapping[str, Any],
        *,
        score: float | None,
    ) -> None:
        """Begin to write a complete checkpoint, or none; returns once all state is copied.

        When it is complete, what neither ``keep_last`` nor ``keep_best`` asks for is deleted.

        Args:
            parts: by name; each saves into a directory of that name.
            progress: what else resuming needs.
            score: success on held-out tasks, where it was measured at this step.

        Raises:
            CheckpointError: it, or the one before, could not be written; earlier ones are intact.
        """
        self.flush()
        target = self.directory / step_name(step)
        writing = self.directory / f".writing-{target.name}-{uuid.uuid4().hex[:8]}"
        state = self._encode(target, progress)
        with self._attempt(writing, target):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._delete_leftovers()
            writing.mkdir()
            pending = [_begin(part, writing / name) for name, part in parts.items()]
        self._saving = _in_background(
            lambda: self._complete(writing, target, pending, state, step=step, score=score)
        )

    def flush(self) -> None:
        """Wait for what is being written.

        Raises:
            CheckpointError: it could not be; raised once.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _complete(
        self,
        writing: Path,
        target: Path,
        pending: list[PendingSave],
        state: EncodedState,
        *,
        step: int,
        score: float | None,
    ) -> None:
        with self._attempt(writing, target):
            for save in pending:
                save.wait()
            state.write(writing)
            write_manifest(writing, step=step, score=score)
            if target.exists():  # of the same step: the run went back to an earlier one
                self._hide_and_delete(target)
            writing.rename(target)
            sync_to_disk(self.directory)
        self._delete_old(step)

    def close(self) -> None:
        """Wait for what is being written, and log where it could not be: for a run that ends."""
        try:
            self.flush()
        except Exception as error:  # another one may be on its way out
            logger.error("%s", error)

    def _encode(self, target: Path, progress: Mapping[str, Any]) -> EncodedState:
        """Copy what this process knows of the run."""
        state = {
            "progress": progress,
            "rng": capture_rng(),
            "config": self._config,
            "versions": provenance(),
        }
        try:
            return encode_state(state)
        except TypeError as error:
            raise CheckpointError(
                f"cannot write the checkpoint {str(target)!r}: {error}. Its state holds something "
                "that cannot be stored: mend the part that returned it from state_dict (under "
                "/progress/feed/curriculum that is the curriculum). Earlier checkpoints are intact "
                f"({self._listed()})"
            ) from error

    @contextmanager
    def _attempt(self, writing: Path, target: Path) -> Iterator[None]:
        """Leave nothing half-written where a part of a save fails, and say what to do."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(writing, ignore_errors=True)
            if not isinstance(error, (OSError, SafetensorError, CheckpointError)):
                raise
            raise CheckpointError(
                f"cannot write the checkpoint {str(target)!r}: {error}; earlier checkpoints are "
                f"intact ({self._listed()}). Free disk space or make the directory writable, then "
                "go on with --resume"
            ) from error

    def _listed(self) -> str:
        return ", ".join(map(step_name, self.steps())) or "none"

    # ------------------------------------------------------------------ reading

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first, without looking inside."""
        if not self.directory.is_dir():
            return []
        found = (step_of(path.name) for path in self.directory.iterdir())
        return sorted(step for step in found if step is not None)

    def best_step(self, *, through: int | None = None) -> int | None:
        """Return the step with the best score, the earliest of equals; None where none has one.

        Args:
            through: the last step to look at.
        """
        best: tuple[float, int] | None = None
        for step in self.steps():
            if through is not None and step > through:
                break
            try:
                score = read_manifest(self.directory / step_name(step)).score
            except CheckpointError as error:  # whoever loads it is told; here it has no score
                logger.warning("%s", error)
                continue
            if score is not None and (best is None or score > best[0]):
                best = (score, step)
        return best[1] if best else None

    def load(self, step: int) -> Checkpoint:
        """Read one checkpoint after comparing all checksums.

        Raises:
            CheckpointError: it is missing or damaged; names the file.
        """
        return load_checkpoint(self.directory / step_name(step))

    def load_latest(self) -> Checkpoint | None:
        """Read the newest sound checkpoint; None where there are none at all.

        Damaged ones are logged and listed in :attr:`Checkpoint.damaged`.

        Raises:
            CheckpointError: there are checkpoints, and every one is damaged.
        """
        damaged: list[str] = []
        for step in reversed(self.steps()):
            try:
                checkpoint = self.load(step)
            except CheckpointError as error:
                damaged.append(str(error))
                continue
            for text in damaged:
                logger.warning("%s; going back to the checkpoint of step %d", text, step)
            checkpoint.damaged = damaged
            return checkpoint
        if damaged:
            raise CheckpointError(
                "no checkpoint can be used: " + "; ".join(damaged) + ". Restore one from a backup, "
                "or start a new run"
            )
        return None

    # ------------------------------------------------------------------ files

    def _delete_old(self, newest: int) -> None:
        """Keep the last and the best up to ``newest``; later ones are of before the run went back.

        Those are overwritten when the run comes to their steps.
        """
        steps = [step for step in self.steps() if step <= newest]
        kept = set(steps[-self._keep_last :])
        if self._keep_best and (best := self.best_step(through=newest)) is not None:
            kept.add(best)
        for step in steps:
            if step not in kept:
                try:
                    self._hide_and_delete(self.directory / step_name(step))
                except OSError as error:  # the run goes on: only space is lost
                    logger.warning("cannot delete the old checkpoint of step %d: %s", step, error)

    def _hide_and_delete(self, path: Path) -> None:
        """Rename first: a half-deleted checkpoint must not be taken for a damaged one."""
        hidden = self.directory / f".deleting-{path.name}-{uuid.uuid4().hex[:8]}"
        path.rename(hidden)
        shutil.rmtree(hidden)

    def _delete_leftovers(self) -> None:
        """Delete what a killed process left half-written or half-deleted."""
        for path in self.directory.iterdir():
            if path.name.startswith(_HIDDEN):
                shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint in directory ``path`` after comparing all checksums.

    Raises:
        CheckpointError: it is missing or damaged; names the file.
    """
    manifest = verify(path)
    try:
        state = read_state(path)
        return Checkpoint(
            path=path,
            step=manifest.step,
            score=manifest.score,
            progress=_mapping(state, "progress"),
            rng=_mapping(state, "rng"),
            config=_mapping(state, "config"),
            versions=_mapping(state, "versions"),
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {str(path)!r} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _mapping(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(state[name], dict):
        raise ValueError(f"{name} is {type(state[name]).__name__}, not a mapping")
    return state[name]


def _begin(part: Part, directory: Path) -> PendingSave:
    directory.mkdir()
    return part.save(directory)


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Run ``work`` in a thread that the end of the process waits for."""
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future
