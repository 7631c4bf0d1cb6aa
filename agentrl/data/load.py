"""Tasks of the splits that have a file."""

from __future__ import annotations

import logging

from agentrl.data.columns import to_tasks
from agentrl.data.config import DataConfig
from agentrl.data.source import read_source
from agentrl.types import Task

logger = logging.getLogger(__name__)


def read_tasks(config: DataConfig, split: str) -> list[Task]:
    """Read the tasks of ``data.<split>``, which must be set.

    Raises:
        DataError: there is nothing, or something that is no task; names file, row and column.
        ConfigError: a package is missing; names the extra.
    """
    key = f"data.{split}"
    tables = read_source(config.sources()[split], split=split)
    left_out = sorted({name for table in tables for name in table.left_out})
    if left_out:
        logger.warning(
            "%s: the columns %s hold values that no task can carry (such as bytes or time stamps) "
            "and are left out",
            key,
            ", ".join(left_out),
        )
    return to_tasks(tables, config.columns, key=key)
