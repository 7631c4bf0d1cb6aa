"""Tasks from Arrow tables: parquet files, and datasets of the ``datasets`` library."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.data.table import Table
from agentrl.errors import ConfigError, DataError
from agentrl.extras import missing_extra

if TYPE_CHECKING:
    import pyarrow

_HUB_SPLITS = {"train": "train", "val": "validation", "test": "test"}


def read_parquet(path: Path) -> Table:
    """Read a parquet file.

    Raises:
        ConfigError: pyarrow is not installed; names the extra.
        DataError: no such file, or it is no parquet.
    """
    parquet = _import("pyarrow.parquet", source=str(path))
    try:
        table = parquet.ParquetFile(path).read()
    except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these two
        raise DataError(f"cannot read {str(path)!r} as parquet: {error}") from error
    return _to_table(str(path), table)


def read_saved_dataset(path: Path) -> Table:
    """Read a directory that ``Dataset.save_to_disk`` wrote.

    Raises:
        ConfigError: datasets is not installed; names the extra.
        DataError: it is none, or holds several splits.
    """
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise DataError(
            f"{path} holds the splits {', '.join(splits)}: name one, such as {path / splits[0]}"
            if splits
            else f"{path} holds no split"
        )
    if not (path / "state.json").is_file():
        raise DataError(
            f"{path} is a directory without a saved dataset: give a file, a pattern such as "
            f"{path}/*.parquet, or a directory that Dataset.save_to_disk wrote"
        )
    datasets = _import("datasets", source=str(path))
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever a damaged directory makes the library raise
        raise DataError(
            f"cannot read the dataset {str(path)!r}: {type(error).__name__}: {error}"
        ) from error
    return _to_table(str(path), dataset.with_format("arrow")[:])


def read_hub_dataset(spec: str, *, split: str) -> Table:
    """Load ``hf:NAME[:CONFIG][:SPLIT]`` with ``datasets.load_dataset``.

    Args:
        spec: two parts are name and split where the second is ``train``, ``validation`` or
            ``test``, else name and configuration; ``NAME::SPLIT`` has no configuration.
        split: ``train``, ``val`` or ``test``: what the dataset is for, and which of its splits is
            taken where ``spec`` names none.

    Raises:
        ConfigError: ``spec`` cannot be read, or datasets is not installed.
        DataError: it cannot be loaded.
    """
    name, config, chosen = parse_hub(spec, split=split)
    datasets = _import("datasets", source=spec)
    try:
        dataset = datasets.load_dataset(name, config, split=chosen)
    except Exception as error:  # network, unknown names, damaged files: the library has no one base
        raise DataError(
            f"cannot load {spec!r} (name {name!r}, configuration {config!r}, split {chosen!r}): "
            f"{type(error).__name__}: {error}"
        ) from error
    return _to_table(spec, dataset.with_format("arrow")[:])


def parse_hub(spec: str, *, split: str) -> tuple[str, str | None, str]:
    """Return (name, configuration, split) of ``hf:NAME[:CONFIG][:SPLIT]``.

    Raises:
        ConfigError: no name, or nothing behind the last colon.
    """
    parts = spec.removeprefix("hf:").split(":", 2)  # a split may hold one: train[:1000]
    if not parts[0] or (len(parts) > 1 and not parts[-1]):
        raise ConfigError(
            f"{spec!r} cannot be read: write hf:NAME, hf:NAME:CONFIG, hf:NAME::SPLIT or "
            "hf:NAME:CONFIG:SPLIT"
        )
    name, default = parts[0], _HUB_SPLITS[split]
    if len(parts) == 3:
        return name, parts[1] or None, parts[2]
    if len(parts) == 2 and parts[1] in _HUB_SPLITS.values():
        return name, None, parts[1]
    return name, parts[1] if len(parts) == 2 else None, default


def _to_table(name: str, table: pyarrow.Table) -> Table:
    """Turn columns into rows of plain data.

    Raises:
        DataError: two columns of one name, or a number that is not finite.
    """
    names = table.column_names
    if len(set(names)) != len(names):
        twice = sorted({column for column in names if names.count(column) > 1})
        raise DataError(f"{name} has two columns of one name: {', '.join(twice)}")
    columns: dict[str, list[Any]] = {}
    left_out: list[str] = []
    for column in names:
        if _is_plain(table.schema.field(column).type):
            columns[column] = table.column(column).to_pylist()
        else:
            left_out.append(column)
    for column, values in columns.items():
        if _may_hold_floats(table.schema.field(column).type):
            _refuse_infinite(name, column, values)
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    return Table(name=name, rows=rows, numbers=range(1, len(rows) + 1), left_out=tuple(left_out))


def _is_plain(kind: Any) -> bool:
    """Whether values of an Arrow type become text, numbers, truth values, None, lists or dicts."""
    types = _import("pyarrow", source="tables").types
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(kind.field(index).type) for index in range(kind.num_fields))
    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_null(kind)
    )


def _may_hold_floats(kind: Any) -> bool:
    return "float" in str(kind) or "double" in str(kind)


def _refuse_infinite(name: str, column: str, values: list[Any]) -> None:
    for index, value in enumerate(values):
        if not _is_finite(value):
            raise DataError(
                f"{name}, row {index + 1}, column {column!r} holds a number that is not finite; "
                "a task could not be stored: replace it, or leave the column out"
            )


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, dict) or all(map(_is_finite, value.values()))


def _import(module: str, *, source: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{missing_extra('data', source)} (JSONL needs nothing)") from error
