"""Checkpoints of a run: atomic, checksummed, complete or absent.

::

    checkpoints/step_000010/manifest.json        size and BLAKE2 of every other file
                            state.json           progress, generators, configuration, versions
                            tensors.safetensors  weights, optimizer, torch's generators

A checkpoint is written under another name, forced to disk and then renamed, so a run that is
killed leaves the previous ones as they were. Loading compares every checksum first; a damaged
checkpoint is named, and the newest sound one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from agentrl.errors import CheckpointError
from agentrl.train.rng_state import capture_rng
from agentrl.train.state_file import read_state, write_state

logger = logging.getLogger(__name__)

MANIFEST_NAME = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step_(\d{6,})")
_HIDDEN = (".writing-", ".deleting-")


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """What a run is resumed from."""

    path: Path
    step: int
    engine: dict[str, Any]
    """State of the training engine."""
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


class CheckpointStore:
    """The ``checkpoints`` directory of one run. One process writes; any may read.

    Args:
        directory: created at the first save.
        config: resolved configuration of the run, stored with every checkpoint.
        keep_last: complete checkpoints to keep, at least 1.
    """

    def __init__(self, directory: Path, *, config: Mapping[str, Any], keep_last: int = 2) -> None:
        self.directory = directory
        self._config = dict(config)
        self._keep_last = max(keep_last, 1)

    @classmethod
    def of_run(cls, run: Path) -> CheckpointStore:
        """Return the store of a run directory, to read from."""
        return cls(run / "checkpoints", config={})

    def save(
        self,
        step: int,
        engines: Mapping[str, Any],
        progress: Mapping[str, Any],
        *,
        score: float | None = None,
    ) -> None:
        """Write a complete checkpoint, or none; then delete what is older than ``keep_last``.

        Raises:
            CheckpointError: it could not be written; earlier ones are intact.
        """
        state = {
            "engine": engines["actor"].state_dict(),
            "progress": progress,
            "rng": capture_rng(),
            "config": self._config,
            "versions": _versions(),
        }
        target = self.directory / f"step_{step:06d}"
        writing = self.directory / f".writing-{target.name}-{uuid.uuid4().hex[:8]}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._delete_leftovers()
            writing.mkdir()
            _write_complete(writing, step, state)
            self._put_in_place(writing, target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(writing, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {str(target)!r}: {error}; earlier checkpoints are "
                f"intact ({self._listed()}). Free disk space or make the directory writable, then "
                "go on with --resume"
            ) from error
        except TypeError as error:
            shutil.rmtree(writing, ignore_errors=True)
            raise CheckpointError(
                f"cannot write the checkpoint {str(target)!r}: {error}. Its state holds something "
                "that cannot be stored: mend the part that returned it from state_dict (under "
                "/progress/feed/curriculum that is the curriculum). Earlier checkpoints are intact "
                f"({self._listed()})"
            ) from error
        self._delete_old()

    def flush(self) -> None:
        """Wait for what is being written: nothing, as saving waits."""

    def _listed(self) -> str:
        return ", ".join(f"step_{n:06d}" for n in self.steps()) or "none"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, oldest first, without looking inside."""
        if not self.directory.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match.group(1)) for match in names if match)

    def load(self, step: int) -> Checkpoint:
        """Read one checkpoint after comparing all checksums.

        Raises:
            CheckpointError: it is missing or damaged; names the file.
        """
        return load_checkpoint(self.directory / f"step_{step:06d}")

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
                logger.warning("%s; trying the one before", error)
                damaged.append(str(error))
                continue
            checkpoint.damaged = damaged
            return checkpoint
        if damaged:
            raise CheckpointError(
                "no checkpoint can be used: " + "; ".join(damaged) + ". Restore one from a backup, "
                "or start a new run"
            )
        return None

    # ------------------------------------------------------------------ files

    def _put_in_place(self, writing: Path, target: Path) -> None:
        if target.exists():  # of the same step: the run went back to an earlier one
            self._hide_and_delete(target)
        writing.rename(target)
        _sync(self.directory)

    def _delete_old(self) -> None:
        for step in self.steps()[: -self._keep_last]:
            try:
                self._hide_and_delete(self.directory / f"step_{step:06d}")
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
    step = _verify(path)
    try:
        state = read_state(path)
        return Checkpoint(
            path=path,
            step=step,
            engine=state["engine"],
            progress=state["progress"],
            rng=state["rng"],
            config=state["config"],
            versions=state["versions"],
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"the checkpoint {str(path)!r} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _write_complete(directory: Path, step: int, state: Mapping[str, Any]) -> None:
    files = write_state(directory, state)
    manifest = {
        "format": FORMAT,
        "step": step,
        "files": {
            path.name: {"bytes": path.stat().st_size, "blake2b": _digest(path)} for path in files
        },
    }
    manifest_path = directory / MANIFEST_NAME
    manifest_path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*files, manifest_path, directory):
        _sync(path)


def _verify(path: Path) -> int:
    """Compare every file with the manifest; return the step."""
    name = str(path)
    manifest_path = path / MANIFEST_NAME
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {name!r}")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        known, step, files = manifest["format"], int(manifest["step"]), dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint {name!r} is damaged: {MANIFEST_NAME}: {error}"
        ) from error
    if known != FORMAT:
        raise CheckpointError(
            f"the checkpoint {name!r} has format {known}, this version reads {FORMAT}; use the "
            "version of agentrl that wrote it"
        )
    named = _NAME.fullmatch(path.name)
    if named and int(named.group(1)) != step:
        raise CheckpointError(f"the checkpoint {name!r} is damaged: it says it is of step {step}")
    for file, facts in files.items():
        if not (path / file).is_file():
            raise CheckpointError(f"the checkpoint {name!r} is damaged: {file} is missing")
        size = (path / file).stat().st_size
        if size != facts["bytes"]:
            raise CheckpointError(
                f"the checkpoint {name!r} is damaged: {file} has {size} bytes, not {facts['bytes']}"
            )
        if _digest(path / file) != facts["blake2b"]:
            raise CheckpointError(
                f"the checkpoint {name!r} is damaged: the content of {file} has changed"
            )
    return step


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _sync(path: Path) -> None:
    """Force a file, or the entries of a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _versions() -> dict[str, str]:
    found = {}
    for package in ("agentrl", "torch", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a checkout that was never installed
            found[package] = "unknown"
    return found
