"""Metrics as TensorBoard event files; needs the extra ``tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.extras import missing_extra
from agentrl.telemetry.tracker import MissingExtraError, TrackedRun, is_number, plain_value


class TensorBoardTracker:
    """Writes scalars to ``<run>/tensorboard``. Text and None are left to ``metrics.jsonl``.

    On resume the steps after ``run.keep_through_step`` are hidden, as TensorBoard does it.

    Raises:
        MissingExtraError: TensorBoard is not installed.
    """

    def __init__(self, run: TrackedRun) -> None:
        try:
            # Through torch: its writer handles purge_step, non-finite values and torn files.
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise MissingExtraError(
                missing_extra("tensorboard", "tracker 'tensorboard'")
            ) from error
        keep = run.keep_through_step
        self._writer = SummaryWriter(
            str(run.directory / "tensorboard"), purge_step=None if keep is None else keep + 1
        )

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write the numbers among ``metrics``."""
        for key, value in metrics.items():
            plain = plain_value(value)
            if is_number(plain):
                self._writer.add_scalar(key, plain, global_step=step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
