"""What a rank of a group is on Ray: an actor around a worker."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
from ray import cloudpickle
from torch import Tensor

from agentrl.batch import Batch
from agentrl.dist.ranks import Ranks, join_ranks
from agentrl.dist.ray_transport import Message, pack
from agentrl.dist.rollout_worker import ProcessSetup
from agentrl.dist.watchdog import StackSource, offer_stacks
from agentrl.dist.worker import Worker, in_words
from agentrl.errors import AgentRLError

ENTRY = "ray_rank.py:_invoke"
"""Where a call begins in a rank's stack."""
COLLECTIVE_TIMEOUT_S = 4 * 3600.0
"""Longer than any call may take: the driver's deadline, which names ranks, is to come first."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Failure:
    """An error of a rank, as data: any exception can cross."""

    error: str
    """Type and message."""
    trace: str
    original: AgentRLError | None
    """The error itself, where it is one of agentrl's."""
    is_of_peer: bool
    """It looks as if another rank had gone."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error that is being handled."""
        original = _crossing(error) if isinstance(error, AgentRLError) else None
        said = in_words(error)
        return cls(
            error=said,
            trace="".join(traceback.format_exception(type(error), error, _of_worker(error))),
            original=original,
            is_of_peer=original is None and ("onnection" in said or "peer" in said),
        )


def _crossing(error: AgentRLError) -> AgentRLError | None:
    """Return the error as it arrives elsewhere; None where its class does not allow it.

    Without its cause and traceback, which may not cross.
    """
    try:
        bare = type(error)(*error.args)
        cloudpickle.loads(cloudpickle.dumps(bare))  # pyright: ignore[reportPrivateImportUsage]
    except Exception:  # of whatever kind: constructors and state of errors are their authors'
        return None
    return bare


def _of_worker(error: BaseException) -> TracebackType | None:
    """Return the traceback without the frames that every call has."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_name != "_invoke":
        trace = trace.tb_next
    return trace.tb_next if trace is not None else error.__traceback__


@dataclass(slots=True, frozen=True, kw_only=True)
class Place:
    """Where an actor was put."""

    node_id: str
    host: str
    """Its node's address."""
    gpus: tuple[int | str, ...]
    stacks: StackSource


class RankActor:
    """The actor. Errors come back as :class:`Failure`.

    Args:
        setup: applied before the worker is built.
    """

    def __init__(self, setup: ProcessSetup) -> None:
        self._stacks = offer_stacks()
        setup.apply(may_stay=True)
        self._worker: Worker | None = None

    def where(self) -> Place:
        """Say where this process runs."""
        context = ray.get_runtime_context()
        return Place(
            node_id=context.get_node_id(),
            host=ray.util.get_node_ip_address(),
            gpus=tuple(ray.get_gpu_ids()),
            stacks=self._stacks,
        )

    def meeting_place(self) -> str:
        """Return an address on this rank's node at which nobody listens yet."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def build(
        self,
        address: str | None,
        place: Mapping[str, Any],
        worker_class: type[Worker],
        message: Message,
        *bulk: Any,
    ) -> Failure | None:
        """Join the other ranks, where there is an address to meet at, and build the worker.

        Args:
            address: where ranks meet.
            place: ``rank``, ``world_size`` and ``device``.
            worker_class: of the worker.
            message: its arguments after ``ranks``.
            bulk: of the message.
        """
        try:
            call = message.open(bulk)
            ranks = (
                Ranks.single(place["device"])
                if address is None
                else join_ranks(address, **place, timeout_s=COLLECTIVE_TIMEOUT_S)
            )
            self._worker = worker_class(ranks, *call.args, **call.kwargs)
        except BaseException as error:
            return Failure.of(error)

    def data_rank(self, mesh: str | None) -> int | Failure:
        """See :meth:`~agentrl.dist.worker.Worker.data_rank`."""
        try:
            assert self._worker is not None, "a rank is built before it is asked"
            return self._worker.data_rank(mesh)
        except BaseException as error:
            return Failure.of(error)

    def call(self, method: str, message: Message, *bulk: Any) -> Any:
        """Call the worker's method and return its result, or a :class:`Failure`."""
        try:
            return pack(self._invoke(method, message, bulk))
        except BaseException as error:
            return Failure.of(error)

    def keep(self, method: str, message: Message, *bulk: Any) -> tuple[Any, Any]:
        """Call as :meth:`call`; two results, of which the second stays in the object store.

        The first is a :class:`Failure`, or the layout of the second, where that is a batch.
        """
        try:
            found = self._invoke(method, message, bulk)
            layout: Tensor | None = found.cu_seqlens if isinstance(found, Batch) else None
            return pack(layout), pack(found)
        except BaseException as error:
            return Failure.of(error), None

    def _invoke(self, method: str, message: Message, bulk: tuple[Any, ...]) -> Any:
        call = message.open(bulk)
        return getattr(self._worker, method)(*call.args, **call.kwargs)
