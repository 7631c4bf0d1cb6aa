"""The run directory: a public interface, written atomically, by one process at a time.

::

    runs/<name>/config.yaml
               /memory_plan.json
               /metrics.jsonl
               /trajectories/step_NNNNNN.jsonl, step_NNNNNN.tokens.safetensors
               /eval/step_NNNNNN.jsonl, step_NNNNNN.tokens.safetensors
               /model/                        configuration and tokenizer
               /checkpoints/step_NNNNNN/
               /report.html, curves.png, trace.json
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ConfigError, DataError
from agentrl.seeding import derive_seed
from agentrl.telemetry.files import atomic_write, sync_folder
from agentrl.telemetry.run_lock import LOCK_FILE, RunLock
from agentrl.telemetry.trajectory_io import PerToken, tokens_path, write_trajectories
from agentrl.types import Trajectory

_STEP_FILE = re.compile(r"step_(\d{6,})\.(?:jsonl|tokens\.safetensors)")
_MAX_NAME_CHARS = 48


@dataclass(slots=True, frozen=True)
class TrajectorySampling:
    """Which trajectories of a step are stored: ``all``, ``sample:N`` or ``none``."""

    limit: int | None
    """None stores all."""

    @classmethod
    def parse(cls, text: str) -> TrajectorySampling:
        """Read ``trainer.trajectories``.

        Raises:
            ConfigError: it is none of the three forms.
        """
        match = re.fullmatch(r"all|none|sample:(\d+)", text.strip())
        if match is None:
            raise ConfigError(
                f"trainer.trajectories={text!r}: write 'all', 'none' or 'sample:N', "
                "for example 'sample:16'"
            )
        if match.group(1) is not None:
            return cls(int(match.group(1)))
        return cls(None if text.strip() == "all" else 0)

    def choose(self, trajectories: Sequence[Trajectory], step: int) -> list[Trajectory]:
        """Return the trajectories to store, in their given order.

        The choice depends on ids and step only, not on the order of arrival.
        """
        if self.limit is None or self.limit >= len(trajectories):
            return list(trajectories)
        ranked = sorted(
            range(len(trajectories)), key=lambda i: derive_seed(step, trajectories[i].id)
        )
        return [trajectories[i] for i in sorted(ranked[: self.limit])]


class RunDir:
    """Paths of a run, and what is written there.

    ``RunDir(path)`` only reads; :meth:`create`, :meth:`create_named` and :meth:`resume` take the
    lock that keeps a second process from writing the same run, until :meth:`close`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: RunLock | None = None
        self._made_root = False

    @classmethod
    def create(cls, path: str | Path, *, exist_ok: bool = False) -> RunDir:
        """Make a new run directory.

        Args:
            path: where.
            exist_ok: accept a directory that holds something else; nothing in it is deleted.

        Raises:
            ConfigError: the directory is not empty, or another process writes to it.
        """
        run = cls(path)
        if run.path.exists() and not run.path.is_dir():
            raise ConfigError(f"trainer.run_dir={str(path)!r} is a file: give a directory")
        if not exist_ok and run.path.is_dir() and _has_content(run.path):
            advice = (
                f"resume it with trainer.resume={path}, or give another directory"
                if run.config_path.is_file()
                else f"it has no {run.config_path.name}, so it is no run to go on with; remove "
                "what is in it, or give another directory"
            )
            raise ConfigError(f"trainer.run_dir={str(path)!r} is not empty: {advice}")
        run.path.mkdir(parents=True, exist_ok=True)
        run._lock = RunLock.acquire(run.path)
        return run

    @classmethod
    def create_named(
        cls, env_id: str, *, root: str | Path = "runs", date: datetime.date | None = None
    ) -> RunDir:
        """Make ``<root>/<env>-<YYYYMMDD>-<n>`` with the first ``n`` that is free."""
        day = (date or datetime.date.today()).strftime("%Y%m%d")
        stem = f"{_slug(env_id)}-{day}"
        made_root = not Path(root).is_dir()
        Path(root).mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = Path(root) / f"{stem}-{number}"
            try:
                path.mkdir()  # whoever makes it, owns it
            except FileExistsError:
                number += 1
            else:
                run = cls.create(path)
                run._made_root = made_root
                return run

    @classmethod
    def resume(cls, path: str | Path) -> RunDir:
        """Open an existing run for writing.

        Raises:
            ConfigError: there is no such run, or another process writes to it.
        """
        run = cls(path)
        if not run.path.is_dir():
            raise ConfigError(f"no run directory {str(path)!r} to resume")
        run._lock = RunLock.acquire(run.path)
        return run

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.resolve().name

    @property
    def config_path(self) -> Path:
        """The resolved config, ``config.yaml``."""
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        """One JSON object per step, ``metrics.jsonl``."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        """Folder of ``step_NNNNNN/`` checkpoints."""
        return self.path / "checkpoints"

    @property
    def report_path(self) -> Path:
        """``report.html``."""
        return self.path / "report.html"

    @property
    def curves_path(self) -> Path:
        """``curves.png``."""
        return self.path / "curves.png"

    @property
    def trace_path(self) -> Path:
        """Chrome trace of the last process, ``trace.json``."""
        return self.path / "trace.json"

    def trajectories_path(self, step: int) -> Path:
        """JSON lines of a training step."""
        return self.path / "trajectories" / f"step_{step:06d}.jsonl"

    @property
    def model_path(self) -> Path:
        """Model configuration and tokenizer; gives reports the text of tokens."""
        return self.path / "model"

    def eval_path(self, step: int) -> Path:
        """JSON lines of the evaluation after ``step`` updates."""
        return self.path / "eval" / f"step_{step:06d}.jsonl"

    def trajectory_steps(self) -> list[int]:
        """Training steps with stored trajectories, ascending."""
        return _steps(self.path / "trajectories", ".jsonl")

    def eval_steps(self) -> list[int]:
        """Steps with a stored evaluation, ascending."""
        return _steps(self.path / "eval", ".jsonl")

    def write_config(self, text: str) -> None:
        """Write ``config.yaml``."""
        atomic_write(self.config_path, text)

    def read_config(self) -> dict[str, Any]:
        """Read ``config.yaml``; an empty dict where it was not written yet.

        Raises:
            DataError: it is no YAML mapping.
        """
        if not self.config_path.is_file():
            return {}
        try:
            config = yaml.safe_load(self.config_path.read_text())
        except yaml.YAMLError as error:
            raise DataError(f"{self.config_path}: no valid YAML ({error})") from error
        if not isinstance(config, dict):
            raise DataError(f"{self.config_path}: a mapping is wanted, got {type(config).__name__}")
        return config

    def write_trajectories(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        *,
        advantages: PerToken | None = None,
        trainer_logprobs: PerToken | None = None,
        sampling: str = "all",
    ) -> None:
        """Store the trajectories of a training step, failures too.

        Args:
            step: as logged in the metrics.
            trajectories: all of the step.
            advantages: trajectory id -> one float32 [T] array per segment.
            trainer_logprobs: the same; NaN where the trainer scored nothing.
            sampling: ``all``, ``sample:N`` or ``none``.

        Raises:
            ConfigError: ``sampling`` is malformed.
            OSError: the disk is full or read-only.
        """
        chosen = TrajectorySampling.parse(sampling)
        if chosen.limit != 0:
            path = self.trajectories_path(step)
            write_trajectories(
                path,
                chosen.choose(trajectories, step),
                advantages,
                trainer_logprobs=trainer_logprobs,
            )

    def write_evaluation(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Store the trajectories of an evaluation after ``step`` updates.

        Raises:
            OSError: the disk is full or read-only.
        """
        write_trajectories(self.eval_path(step), trajectories)

    def rewind(self, step: int) -> None:
        """On resume from the checkpoint of ``step``: delete what later steps had written.

        The metrics are cut by the trackers (``TrackedRun.keep_through_step``), so that each
        tracker owns its file.
        """
        for folder in (self.path / "trajectories", self.path / "eval"):
            for later in (known for known in _steps(folder) if known > step):
                path = folder / f"step_{later:06d}.jsonl"
                path.unlink(missing_ok=True)
                tokens_path(path).unlink(missing_ok=True)
            sync_folder(folder)

    def refuse_unwritable(self) -> None:
        """See that everything that is there can be written, before anything is computed for it.

        Raises:
            ConfigError: names the folder or file that cannot.
        """
        for name in ("", "checkpoints", "trajectories", "eval"):
            folder = self.path / name
            if os.path.lexists(folder):  # what is not there yet is made in self.path
                _probe(folder)
        for file in (self.metrics_path, self.config_path):
            if os.path.lexists(file):
                with _named(file):
                    file.open("ab").close()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def remove_if_empty(self) -> None:
        """Remove a directory in which nothing but the lock's file was ever written."""
        if self.path.is_dir() and not _has_content(self.path):
            (self.path / LOCK_FILE).unlink(missing_ok=True)
            self.path.rmdir()
            if self._made_root:
                with contextlib.suppress(OSError):  # another run may have come meanwhile
                    self.path.parent.rmdir()

    def __enter__(self) -> RunDir:
        """Return itself."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Release the lock."""
        self.close()


def _probe(folder: Path) -> None:
    """Write a file into ``folder`` and delete it; a check of permissions would not do for root."""
    probe = folder / f".writable-{uuid.uuid4().hex[:8]}"
    with _named(folder):
        try:
            probe.write_bytes(bytes(4096))
        finally:
            probe.unlink(missing_ok=True)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn what the system says of a write into a message that names ``path``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{str(path)!r} cannot be written ({error.strerror}), which a run has to: mend it, or "
            "give another trainer.run_dir"
        ) from error


def _has_content(folder: Path) -> bool:
    # A start that was refused after the lock was taken leaves the lock file alone behind.
    return any(path.name != LOCK_FILE for path in folder.iterdir())


def _steps(folder: Path, suffix: str = "") -> list[int]:
    """Steps that have a file; a tokens file alone is what a kill left of a step."""
    if not folder.is_dir():
        return []
    names = (path.name for path in folder.iterdir() if path.name.endswith(suffix))
    matches = (_STEP_FILE.fullmatch(name) for name in names)
    return sorted({int(match.group(1)) for match in matches if match})


def _slug(env_id: str) -> str:
    """Make a folder name of ``code_sandbox``, ``package.module:Class`` or ``./file.py:Class``."""
    last = env_id.rpartition(":")[2]
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", last).strip("-.")[:_MAX_NAME_CHARS] or "run"
