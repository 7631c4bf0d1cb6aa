"""Folders of a run that must stay as they were written: weights that it measures or adds to."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from agentrl.dist.sharded_state import read_json_object
from agentrl.errors import CheckpointError

SEAL_NAME = "digests.json"


def seal(folder: Path) -> None:
    """Note the digest of every file in ``folder``."""
    (folder / SEAL_NAME).write_text(json.dumps(_digests(folder), indent=1), encoding="utf-8")


def refuse_damaged(folder: Path, *, what: str) -> None:
    """Compare every file with what :func:`seal` noted.

    Args:
        what: the folder holds, for messages: what cannot be done without it.

    Raises:
        CheckpointError: it is missing, or a file has changed, is missing or new; names it.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{str(folder)!r} is missing: it holds {what}, which a resumed run cannot do without; "
            "restore it, or start a new run"
        )
    try:
        noted = read_json_object(folder / SEAL_NAME)
    except (OSError, ValueError) as error:
        raise _damaged(folder, f"{SEAL_NAME}: {error}", what) from error
    found = _digests(folder)
    if noted != found:
        names = sorted(
            name for name in noted.keys() | found.keys() if noted.get(name) != found.get(name)
        )
        raise _damaged(folder, f"{', '.join(names)} changed since it was written", what)


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.name != SEAL_NAME and path.is_file():
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(
                    file, "blake2b"
                ).hexdigest()
    return found


def _damaged(folder: Path, why: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{str(folder)!r} is damaged: {why}; it holds {what}: restore it, or start a new run"
    )
