"""A rank that trains: the engines of all roles placed on it, behind methods a group calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from agentrl.batch import Batch, RowView
from agentrl.dist.dispatch import Collective, DataParallel, OneToAll
from agentrl.dist.engine import LossFn, TrainEngine
from agentrl.dist.lora import AdaptedEngine, WithoutAdapters
from agentrl.dist.ranks import Ranks
from agentrl.dist.weight_sync.sender import EngineSender
from agentrl.dist.weight_sync.shipment import Shipment, ship
from agentrl.dist.worker import Worker, register
from agentrl.weights.buckets import Bucket

COMPUTE_TIMEOUT_S = 3600.0
"""Deadline of a pass over a mini-batch or a step's batch."""
STATE_TIMEOUT_S = 1800.0
"""Deadline of reading, copying or writing weights and optimizer."""

REPLICATED = frozenset({"grad_norm", "lr", "micro_batches", "skipped"})
"""Metrics of an update that every rank knows as a whole."""


class RankEngine(TrainEngine, Protocol):
    """A training engine on one rank: it takes its rows without having them copied first."""

    def train_mini_batch(
        self,
        batch: Batch | RowView,
        loss_fn: LossFn,
        *,
        tokens_per_micro_batch: int,
        keep: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Train on this rank's rows; ``loss_fn``'s metrics are those of these rows."""
        ...

    def infer_batch(
        self,
        batch: Batch | RowView,
        *,
        tokens_per_micro_batch: int,
        fields: Sequence[str] = ("logprobs",),
    ) -> dict[str, Tensor]:
        """Score this rank's rows."""
        ...


EngineBuilder = Callable[[Ranks], RankEngine]
"""Builds a role's engine on a rank; can be pickled."""


class EngineWorker(Worker):
    """Roles that share a process, its device and its process group.

    Args:
        ranks: where it stands.
        builders: role -> what builds its engine; built in this order on every rank.
    """

    def __init__(self, ranks: Ranks, builders: Mapping[str, EngineBuilder]) -> None:
        super().__init__(ranks)
        self.engines = {role: build(ranks) for role, build in builders.items()}
        self._senders: dict[str, EngineSender] = {}
        self._exports: dict[str, Iterator[tuple[str, Tensor]]] = {}
        self._saves: dict[tuple[str, Path], Future[None]] = {}

    def data_rank(self, mesh: str | None) -> int:
        """Return the role's data-parallel rank: ranks of one sequence get the same rows."""
        place = self.ranks if mesh is None else getattr(self.engines[mesh], "ranks", self.ranks)
        return place.dp_rank

    @register(
        dispatch=DataParallel(mesh_argument=0, replicated=REPLICATED), timeout_s=COMPUTE_TIMEOUT_S
    )
    def train_mini_batch(
        self,
        role: str,
        batch: RowView,
        loss_fn: LossFn,
        *,
        tokens_per_micro_batch: int,
        keep: Sequence[str] = (),
    ) -> dict[str, Any]:
        """See :meth:`~agentrl.dist.engine.TrainEngine.train_mini_batch`, of this rank's rows."""
        return self.engines[role].train_mini_batch(
            batch, loss_fn, tokens_per_micro_batch=tokens_per_micro_batch, keep=keep
        )

    @register(dispatch=DataParallel(mesh_argument=0), timeout_s=COMPUTE_TIMEOUT_S)
    def infer_batch(
        self, role: str, batch: RowView, *, tokens_per_micro_batch: int, fields: Sequence[str]
    ) -> dict[str, Tensor]:
        """See :meth:`~agentrl.dist.engine.TrainEngine.infer_batch`, of this rank's rows."""
        return self.engines[role].infer_batch(
            batch, tokens_per_micro_batch=tokens_per_micro_batch, fields=fields
        )

    @register(dispatch=DataParallel(mesh_argument=0), timeout_s=COMPUTE_TIMEOUT_S)
    def infer_without_adapters(
        self, role: str, batch: RowView, *, tokens_per_micro_batch: int, fields: Sequence[str]
    ) -> dict[str, Tensor]:
        """Score this rank's rows with what the role's adapters were attached to."""
        return WithoutAdapters(cast(AdaptedEngine, self.engines[role])).infer_batch(
            batch, tokens_per_micro_batch=tokens_per_micro_batch, fields=fields
        )

    @register(dispatch=Collective())
    def counters(self, role: str) -> dict[str, int]:
        """Return ``num_updates`` and ``num_skipped`` of an engine."""
        engine = self.engines[role]
        return {"num_updates": engine.num_updates, "num_skipped": engine.num_skipped}

    @register(dispatch=Collective())
    def begin_export(self, role: str) -> None:
        """Start the stream of an engine's parameters over."""
        self._exports[role] = self.engines[role].export_params()

    @register(dispatch=Collective(), timeout_s=STATE_TIMEOUT_S)
    def next_params(self, role: str, max_bytes: int) -> list[tuple[str, Tensor]] | None:
        """Return the stream's next tensors, on rank 0; an empty list ends it.

        Every rank takes part, since sharded tensors are gathered.

        Args:
            role: whose export has begun.
            max_bytes: of one answer; a larger tensor comes alone.
        """
        found: list[tuple[str, Tensor]] = []
        size = 0
        while size < max_bytes and (item := next(self._exports[role], None)) is not None:
            found.append(item)
            size += item[1].nbytes
        return found if self.ranks.rank == 0 else None

    @register(dispatch=Collective(), timeout_s=STATE_TIMEOUT_S)
    def ship(
        self,
        role: str,
        *,
        version: int,
        bucket_bytes: int,
        dtypes: Mapping[str, str],
        put: Callable[[Bucket], Any],
    ) -> Shipment | None:
        """Gather an engine's parameters on all ranks; rank 0 packs them and hands them to ``put``.

        Args: see :func:`agentrl.dist.weight_sync.shipment.ship`.
        """
        params = self.engines[role].export_params()
        if self.ranks.rank:
            for _ in params:  # takes part in gathering
                pass
            return None
        return ship(params, version=version, bucket_bytes=bucket_bytes, dtypes=dtypes, put=put)

    @register(dispatch=OneToAll(), timeout_s=STATE_TIMEOUT_S)
    def weight_sender(self, role: str, call: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the :class:`~agentrl.dist.weight_sync.sender.EngineSender` of a role.

        Returns:
            its result, or the error of the channel, which ends no group.
        """
        if role not in self._senders:
            self._senders[role] = EngineSender(
                self.engines[role], device=self.ranks.device, rank=self.ranks.rank
            )
        return self._senders[role].call(call, args)

    @register(dispatch=OneToAll(), timeout_s=STATE_TIMEOUT_S)
    def begin_save(self, role: str, directory: Path) -> None:
        """Copy an engine's state and start writing it; see :meth:`is_saved`."""
        pending = self.engines[role].save(directory)
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"save-{role}")
        self._saves[role, directory] = executor.submit(pending.wait)
        executor.shutdown(wait=False)

    # It waits its turn behind a pass that the rank has begun.
    @register(dispatch=OneToAll(), timeout_s=COMPUTE_TIMEOUT_S + STATE_TIMEOUT_S)
    def is_saved(self, role: str, directory: Path) -> bool:
        """Whether this rank's part of a state is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        save = self._saves[role, directory]
        if save.done():
            save.result()
        return save.done()

    @register(dispatch=OneToAll(), timeout_s=STATE_TIMEOUT_S)
    def load(self, role: str, directory: Path) -> None:
        """Undo a save; see :meth:`~agentrl.dist.engine.TrainEngine.load`."""
        self.engines[role].load(directory)

    @register(dispatch=OneToAll(), timeout_s=STATE_TIMEOUT_S)
    def export_pretrained(self, role: str, directory: Path) -> None:
        """See :meth:`~agentrl.dist.engine.TrainEngine.export_pretrained`."""
        self.engines[role].export_pretrained(directory)

    @register(dispatch=OneToAll())
    def onload(self, role: str) -> None:
        """See :meth:`~agentrl.dist.engine.TrainEngine.onload`."""
        self.engines[role].onload()

    @register(dispatch=OneToAll())
    def offload(self, role: str) -> None:
        """See :meth:`~agentrl.dist.engine.TrainEngine.offload`."""
        self.engines[role].offload()

    @register(dispatch=OneToAll())
    def describe(self) -> dict[str, Any]:
        """Return where this rank stands: rank, device and roles."""
        return {
            "rank": self.ranks.rank,
            "device": str(self.ranks.device),
            "roles": list(self.engines),
        }
