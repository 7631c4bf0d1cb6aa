"""The manifest of a checkpoint: every file of it, with its size and checksum."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.dist.sharded_state import read_json_object, sync_to_disk
from agentrl.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT = 2
"""1: the state of one process in one file."""
_NAME = re.compile(r"step_(\d{6,})")
_NUM_HASHING_THREADS = 8
_OWN_DIGEST = "blake2b"
_MAX_SCORE = 1e300


@dataclass(slots=True, kw_only=True, frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    score: float | None
    """Success on held-out tasks at this step, where it was measured; higher is better."""
    files: Mapping[str, Mapping[str, Any]]
    """Path in the checkpoint -> ``bytes`` and ``blake2b``."""


def step_name(step: int) -> str:
    """Return the directory name of the checkpoint of ``step``."""
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """Undo :func:`step_name`; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def write_manifest(directory: Path, *, step: int, score: float | None) -> None:
    """Note every file below ``directory``, and force them and the manifest to disk.

    Raises:
        OSError: a file cannot be read or written.
    """
    files = _facts_of(directory, _files_below(directory))
    manifest = {"format": FORMAT, "step": step, "score": score, "files": files}
    signed = manifest | {_OWN_DIGEST: _digest_of_manifest(manifest)}
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps(signed, indent=1), encoding="utf-8")
    folders = {(directory / name).parent for name in files} | {directory}
    for written in (*(directory / name for name in files), path, *folders):
        sync_to_disk(written)


def read_manifest(directory: Path) -> Manifest:
    """Read what a checkpoint says of itself; its files are not looked at.

    Raises:
        CheckpointError: there is none, it is damaged, or of another version's format.
    """
    name = str(directory)
    if not directory.is_dir():
        raise CheckpointError(f"there is no checkpoint {name!r}")
    try:
        found = read_json_object(directory / MANIFEST_NAME)
        known = found["format"]
        if known != FORMAT:
            raise _other_format(name, known)
        if found.pop(_OWN_DIGEST) != _digest_of_manifest(found):
            raise ValueError("its content has changed")
        manifest = _manifest(found)
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(name, f"{MANIFEST_NAME}: {type(error).__name__}: {error}") from error
    if step_of(directory.name) not in (None, manifest.step):
        raise _damaged(name, f"it says it is of step {manifest.step}")
    return manifest


def _manifest(found: Mapping[str, Any]) -> Manifest:
    """Return what was read, if it is of the right form.

    Raises:
        ValueError, KeyError: it is not.
    """
    step, score, files = found["step"], found["score"], found["files"]
    if type(step) is not int or step < 0:
        raise ValueError(f"step is {step!r}, a whole number of at least 0 is wanted")
    if score is not None and not (type(score) in (int, float) and abs(score) < _MAX_SCORE):
        raise ValueError(f"score is {score!r}, a finite number or null is wanted")
    if not isinstance(files, dict) or not all(map(_are_facts, files.values())):
        raise ValueError("files does not give every file its bytes and blake2b")
    return Manifest(step=step, score=None if score is None else float(score), files=files)


def _are_facts(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and type(value.get("bytes")) is int
        and isinstance(value.get("blake2b"), str)
    )


def verify(directory: Path) -> Manifest:
    """Compare every file of a checkpoint with its manifest.

    Raises:
        CheckpointError: one is missing, too many, or not what was written; names it.
    """
    manifest, name = read_manifest(directory), str(directory)
    there = set(_files_below(directory))
    for file in sorted(there ^ manifest.files.keys()):
        why = "is not of it" if file in there else "is missing"
        raise _damaged(name, f"{file} {why}")
    try:
        for file, facts in manifest.files.items():
            size = (directory / file).stat().st_size
            if size != facts["bytes"]:
                raise _damaged(name, f"{file} has {size} bytes, not {facts['bytes']}")
        found = _facts_of(directory, manifest.files)
    except OSError as error:
        raise _damaged(name, str(error)) from error
    for file, facts in manifest.files.items():
        if found[file]["blake2b"] != facts["blake2b"]:
            raise _damaged(name, f"the content of {file} has changed")
    return manifest


def _files_below(directory: Path) -> list[str]:
    """Return every file but the manifest, links and pipes included, by its path within."""
    names = [
        os.path.relpath(os.path.join(folder, file), directory)
        for folder, _, files in os.walk(directory)
        for file in files
    ]
    return sorted(name for name in names if name != MANIFEST_NAME)


def _facts_of(directory: Path, files: Mapping[str, Any] | list[str]) -> dict[str, dict[str, Any]]:
    with ThreadPoolExecutor(_NUM_HASHING_THREADS) as pool:  # hashing needs no interpreter lock
        digests = pool.map(lambda file: _digest(directory / file), files)
        return {
            file: {"bytes": (directory / file).stat().st_size, "blake2b": digest}
            for file, digest in zip(files, digests, strict=True)
        }


def _digest_of_manifest(manifest: Mapping[str, Any]) -> str:
    """Of all but this digest itself, in any layout of the text."""
    return hashlib.blake2b(json.dumps(manifest).encode(), digest_size=32).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _damaged(checkpoint: str, why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {checkpoint!r} is damaged: {why}")


def _other_format(checkpoint: str, found: object) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {checkpoint!r} has format {found}, this version reads {FORMAT}: finish "
        "the run with the version of agentrl that wrote it, or export its policy there (agentrl "
        "export RUN OUT) and start a new run from that with model.path=OUT"
    )
