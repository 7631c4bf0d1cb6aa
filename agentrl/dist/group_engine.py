"""A training engine that is a role on every rank of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from agentrl.batch import Batch
from agentrl.dist.engine import LossFn
from agentrl.dist.engine_worker import STATE_TIMEOUT_S
from agentrl.dist.weight_sync.sender import raise_first
from agentrl.dist.weight_sync.shipment import Shipment
from agentrl.dist.worker_group import WorkerGroup
from agentrl.errors import CheckpointError
from agentrl.weights.buckets import Bucket

_POLL_S = 0.05
_EXPORT_BYTES = 256 << 20


class GroupEngine:
    """The driver's side of a role: a :class:`~agentrl.dist.engine.TrainEngine`.

    Several of them can share a group, whose ranks then hold several roles.

    Args:
        group: of :class:`~agentrl.dist.engine_worker.EngineWorker`.
        role: which of its engines.
    """

    def __init__(self, group: WorkerGroup, role: str = "actor") -> None:
        self.group = group
        self.role = role

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken."""
        return self.group.call("counters", self.role)["num_updates"]

    @property
    def num_skipped(self) -> int:
        """Optimizer steps left out because the gradient was not finite."""
        return self.group.call("counters", self.role)["num_skipped"]

    def train_mini_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        tokens_per_micro_batch: int,
        keep: Sequence[str] = (),
    ) -> dict[str, Any]:
        """See :meth:`~agentrl.dist.engine.TrainEngine.train_mini_batch`."""
        return self.group.call(
            "train_mini_batch",
            self.role,
            batch,
            loss_fn,
            tokens_per_micro_batch=tokens_per_micro_batch,
            keep=tuple(keep),
        )

    def infer_batch(
        self, batch: Batch, *, tokens_per_micro_batch: int, fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, Tensor]:
        """See :meth:`~agentrl.dist.engine.TrainEngine.infer_batch`."""
        return self.group.call(
            "infer_batch",
            self.role,
            batch,
            tokens_per_micro_batch=tokens_per_micro_batch,
            fields=tuple(fields),
        )

    def without_adapters(self) -> GroupWithoutAdapters:
        """Return the policy that the role's adapters were attached to."""
        return GroupWithoutAdapters(self.group, self.role)

    def export_params(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`~agentrl.dist.engine.TrainEngine.export_params`.

        In process the tensors are the live ones: a receiver that keeps them must copy.
        """
        self.group.call("begin_export", self.role)
        while found := self.group.call("next_params", self.role, _EXPORT_BYTES):
            yield from found

    def ship(
        self,
        *,
        version: int,
        bucket_bytes: int,
        dtypes: Mapping[str, str],
        put: Callable[[Bucket], Any],
    ) -> Shipment:
        """Pack the parameters where rank 0 is; what comes here are references.

        Args: see :func:`agentrl.dist.weight_sync.shipment.ship`; ``put`` can be pickled.
        """
        return self.group.call(
            "ship",
            self.role,
            version=version,
            bucket_bytes=bucket_bytes,
            dtypes=dict(dtypes),
            put=put,
        )

    def weight_sender(self, call: str, *args: Any) -> list[Any]:
        """See :class:`~agentrl.dist.weight_sync.sender.SendingRanks`."""
        return raise_first(self.group.call("weight_sender", self.role, call, args))

    def save(self, directory: Path) -> GroupSave:
        """See :meth:`~agentrl.dist.engine.TrainEngine.save`."""
        # Ranks may work in another directory.
        self.group.call("begin_save", self.role, directory.absolute())
        return GroupSave(self.group, self.role, directory.absolute())

    def load(self, directory: Path) -> None:
        """See :meth:`~agentrl.dist.engine.TrainEngine.load`."""
        self.group.call("load", self.role, directory.absolute())

    def export_pretrained(self, directory: Path) -> None:
        """See :meth:`~agentrl.dist.engine.TrainEngine.export_pretrained`."""
        self.group.call("export_pretrained", self.role, directory.absolute())

    def onload(self) -> None:
        """See :meth:`~agentrl.dist.engine.TrainEngine.onload`."""
        self.group.call("onload", self.role)

    def offload(self) -> None:
        """See :meth:`~agentrl.dist.engine.TrainEngine.offload`."""
        self.group.call("offload", self.role)


class GroupWithoutAdapters:
    """The driver's side of :class:`~agentrl.dist.lora.WithoutAdapters`."""

    def __init__(self, group: WorkerGroup, role: str) -> None:
        self._group = group
        self._role = role

    def infer_batch(
        self, batch: Batch, *, tokens_per_micro_batch: int, fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, Tensor]:
        """See :meth:`~agentrl.dist.engine.TrainEngine.infer_batch`."""
        return self._group.call(
            "infer_without_adapters",
            self._role,
            batch,
            tokens_per_micro_batch=tokens_per_micro_batch,
            fields=tuple(fields),
        )

    def offload(self) -> None:
        """Do nothing: the weights are the actor's."""


class GroupSave:
    """A state on its way to disk, from all ranks; a :class:`~agentrl.dist.engine.PendingSave`."""

    def __init__(self, group: WorkerGroup, role: str, directory: Path) -> None:
        self._group = group
        self._role = role
        self._directory = directory
        self._done = False

    def wait(self) -> None:
        """Return once every rank's files are written.

        Asks now and then instead of occupying the ranks, which may train meanwhile.

        Raises:
            CheckpointError: they could not be written, or not in time.
        """
        deadline = time.monotonic() + STATE_TIMEOUT_S
        while not self._done:
            self._done = all(self._group.call("is_saved", self._role, self._directory))
            if self._done:
                return
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self._role}: its state was not in {str(self._directory)!r} after "
                    f"{STATE_TIMEOUT_S:.0f} s; look whether that file system still answers"
                )
            time.sleep(_POLL_S)
