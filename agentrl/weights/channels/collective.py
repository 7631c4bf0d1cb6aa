"""Buckets by broadcast: ``nccl`` between GPUs, ``gloo`` between CPUs, over any distance.

A process group of its own for each sender, beside the default one of the training ranks: nobody
else's collectives can get in between. The sender is rank 0; receivers number themselves at its
store. Everybody joins in the background, so that opening never waits for others; the first bucket
does.

NCCL reads its own environment: where multicast over NVLink is not allowed, ``NCCL_NVLS_ENABLE=0``
has to stand in that of every process.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from agentrl.errors import EngineError
from agentrl.weights.channels.base import NUM_SLOTS, Address, Channel, Packer
from agentrl.weights.plan import BucketPlan

_ROOT = 0
_GRACE_S = 10.0
"""For a group that failed to say so itself."""


@dataclass(slots=True, frozen=True)
class Backend:
    """A library that broadcasts."""

    name: str
    device_type: str

    def join(self, store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
        """Join a group; returns once everybody has.

        Returns:
            a backend of :mod:`torch.distributed`, which is not its default group.
        """
        prefix = PrefixStore("group", store)
        limit = timedelta(seconds=timeout_s)
        if self.name == "gloo":
            group: Any = dist.ProcessGroupGloo(prefix, rank, size, limit)
        else:
            torch.cuda.set_device(device)  # of this thread
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            group = dist.ProcessGroupNCCL(prefix, rank, size, options)
        # The first collective builds the connections: not while a bucket waits for it.
        group.broadcast(torch.zeros(1, device=device), _ROOT).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return group


class _Member:
    """One process's place in a group that is being joined."""

    def __init__(self, backend: Backend, device: torch.device, timeout_s: float) -> None:
        self._backend, self._device, self._timeout_s = backend, device, timeout_s
        if device.type != backend.device_type:
            raise EngineError(
                f"weight_sync.transport={backend.name} on {device}: it works on "
                f"{backend.device_type} devices; use {'gloo' if device.type == 'cpu' else 'nccl'}"
            )
        self._joining: Future[Any] | None = None
        self._group: Any = None

    def join(self, store: Any, rank: int, size: int) -> None:
        """Begin to join."""
        backend, device, timeout_s = self._backend, self._device, self._timeout_s
        self._joining = joining = Future[Any]()

        def work() -> None:
            try:
                joining.set_result(backend.join(store, rank, size, device, timeout_s))
            except BaseException as error:
                joining.set_exception(error)

        # A daemon: a process that ends does not wait for those who never came.
        threading.Thread(target=work, name="weights-join", daemon=True).start()

    def broadcast(self, flat: Tensor) -> Any:
        """Take part in the next broadcast.

        Returns:
            torch's handle of work in flight.

        Raises:
            EngineError: not everybody joined in time.
        """
        if self._group is None:
            assert self._joining is not None
            try:
                self._group = self._joining.result(self._timeout_s + _GRACE_S)
            except (RuntimeError, FutureTimeout) as error:
                raise self.failed("join the group of sender and receivers", error) from error
        try:
            return self._group.broadcast(flat, _ROOT)
        except RuntimeError as error:
            raise self.failed("begin a broadcast", error) from error

    def failed(self, what: str, error: BaseException) -> EngineError:
        """Return the error that says so."""
        lines = str(error).strip().splitlines()
        return EngineError(
            f"weight_sync.transport={self._backend.name}: this process could not {what} within "
            f"{self._timeout_s:g} s ({type(error).__name__}: {lines[0] if lines else ''}); a "
            "process is gone or hangs, or the network between them is blocked"
        )

    def leave(self, held: list[Any]) -> None:
        """Leave without waiting for the others: what is in flight may be for one that is gone.

        Args:
            held: work in flight and stores, which wait when they are let go. Emptied.
        """
        group, self._group, self._joining = [self._group], None, None  # no name holds it here
        threading.Thread(
            target=_let_go, args=[group, held], name="weights-leave", daemon=True
        ).start()


class BroadcastSender:
    """See :class:`~agentrl.weights.channels.base.Sender`."""

    def __init__(
        self,
        backend: Backend,
        plan: BucketPlan,
        *,
        device: torch.device,
        num_receivers: int,
        timeout_s: float,
    ) -> None:
        self.plan = plan
        self._member = _Member(backend, device, timeout_s)
        host = _own_address()
        limit = timedelta(seconds=timeout_s)
        try:
            self._store: Any = TCPStore(
                host, 0, is_master=True, wait_for_workers=False, timeout=limit
            )
        except RuntimeError as error:
            what = f"open a meeting place at {host}, the address of this machine's name,"
            raise self._member.failed(what, error) from error
        size = 1 + num_receivers
        self.address = Address(
            transport=backend.name,
            timeout_s=timeout_s,
            details={"host": host, "port": self._store.port, "size": size},
        )
        shape = max(1, plan.slot_bytes)
        slots = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self._packer = Packer(plan, slots)
        self._in_flight: list[Any] = [None] * NUM_SLOTS
        self._member.join(self._store, _ROOT, size)

    @property
    def sums(self) -> dict[str, int]:
        """See :class:`~agentrl.weights.channels.base.Sender`."""
        return self._packer.sums

    def send(self, index: int, tensors: Sequence[Tensor]) -> None:
        """See :class:`~agentrl.weights.channels.base.Sender`; the broadcast goes on behind it."""
        slot = index % NUM_SLOTS
        before, self._in_flight[slot] = self._in_flight[slot], None
        if before is not None:
            _wait(self._member, before)
        self._in_flight[slot] = self._member.broadcast(self._packer.pack(index, tensors))

    def close(self) -> None:
        """Leave the group."""
        held = [*self._in_flight, self._store]
        self._in_flight, self._store = [None] * NUM_SLOTS, None
        self._member.leave(held)


class BroadcastReceiver:
    """See :class:`~agentrl.weights.channels.base.Receiver`."""

    def __init__(
        self, backend: Backend, address: Address, plan: BucketPlan, device: torch.device
    ) -> None:
        self._plan = plan
        self._member = _Member(backend, device, address.timeout_s)
        details, limit = address.details, timedelta(seconds=address.timeout_s)
        try:
            self._store: Any = TCPStore(
                details["host"], details["port"], is_master=False, timeout=limit
            )
            rank = self._store.add("receivers", 1)
        except RuntimeError as error:
            raise self._member.failed("reach the sender", error) from error
        if rank >= details["size"]:
            raise EngineError(
                f"weight_sync.transport={backend.name}: {rank} receivers came where the sender "
                f"expects {details['size'] - 1}; a replaced one needs a new sender"
            )
        shape = max(1, plan.slot_bytes)
        self._slots = [
            torch.empty(shape, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)
        ]
        self._member.join(self._store, rank, details["size"])

    def receive(self, index: int) -> Tensor:
        """See :class:`~agentrl.weights.channels.base.Receiver`."""
        flat = self._slots[index % NUM_SLOTS][: self._plan.buckets[index].num_bytes]
        _wait(self._member, self._member.broadcast(flat))
        return flat

    def close(self) -> None:
        """Leave the group."""
        held, self._store = [self._store], None
        self._member.leave(held)


def _let_go(group: list[Any], held: list[Any]) -> None:
    if group[0] is not None:
        group[0].abort()
    group.clear()
    held.clear()


def _wait(member: _Member, work: Any) -> None:
    """Wait for a broadcast; on a GPU, have the current stream wait for it."""
    try:
        work.wait()
    except RuntimeError as error:
        raise member.failed("finish a broadcast", error) from error


def _own_address() -> str:
    """Return an address of this machine that others can reach, or that of loopback."""
    try:
        found = socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
    return found


def _channel(backend: Backend) -> Channel:
    def sender(plan: BucketPlan, **given: Any) -> BroadcastSender:
        return BroadcastSender(backend, plan, **given)

    def receiver(address: Address, plan: BucketPlan, device: torch.device) -> BroadcastReceiver:
        return BroadcastReceiver(backend, address, plan, device)

    return Channel(sender, receiver)


GLOO = _channel(Backend("gloo", "cpu"))
NCCL = _channel(Backend("nccl", "cuda"))
