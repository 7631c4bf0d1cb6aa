"""From what ``data.train`` names to tables of rows."""

from __future__ import annotations

import glob
from pathlib import Path

from agentrl.data.arrow import read_hub_dataset, read_parquet, read_saved_dataset
from agentrl.data.jsonl import read_jsonl
from agentrl.data.table import Table
from agentrl.errors import DataError

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")


def read_source(source: str, *, split: str) -> list[Table]:
    """Read everything that ``source`` names, one table per file, patterns in order of names.

    Args:
        source: a file, a pattern of files, a saved dataset's directory, or ``hf:...``.
        split: ``train``, ``val`` or ``test``.

    Raises:
        DataError: nothing is there, or it cannot be read; names file and row.
        ConfigError: a package is missing; names the extra.
    """
    key = f"data.{split}"
    if source.startswith("hf:"):
        return [read_hub_dataset(source, split=split)]
    if not source.strip():
        raise DataError(f"{key} is empty: give a file, or leave the setting out")
    path = Path(source).expanduser()
    if path.is_dir():
        return [read_saved_dataset(path)]
    if path.exists():
        return [_read_file(path, key=key)]
    if glob.has_magic(source):
        found = sorted(glob.glob(str(path), recursive=True))
        if not found:
            raise DataError(
                f"{key}={source!r}: no file matches; paths are relative to {Path.cwd()}"
            )
        return [_read_file(Path(name), key=key) for name in found]
    raise DataError(
        f"{key}={source!r}: there is no such file; paths are relative to {Path.cwd()}, and "
        "datasets of a hub are written hf:NAME"
    )


def _read_file(path: Path, *, key: str) -> Table:
    if not path.is_file():  # links followed; a pipe or a device might never end
        raise DataError(
            f"{key}: {str(path)!r} is {_kind_of(path)}, not a regular file: save the tasks to a "
            "file and name that"
        )
    suffix = path.suffix.lower()
    if suffix in _JSON_LINES:
        return read_jsonl(path)
    if suffix in _PARQUET:
        return read_parquet(path)
    raise DataError(
        f"{key}: {str(path)!r} ends in {suffix or 'nothing'}; known are "
        f"{', '.join(_JSON_LINES + _PARQUET)}"
    )


def _kind_of(path: Path) -> str:
    kinds = {
        "a pipe": path.is_fifo,
        "a device": lambda: path.is_char_device() or path.is_block_device(),
        "a socket": path.is_socket,
        "a directory": path.is_dir,
        "a link to nothing": path.is_symlink,
    }
    return next((name for name, holds in kinds.items() if holds()), "something else")
