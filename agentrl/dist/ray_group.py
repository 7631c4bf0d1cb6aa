"""A group of workers on Ray: one actor per rank, in a placement group."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from agentrl.dist.config import PoolConfig
from agentrl.dist.dispatch import Call, Handle, Layout
from agentrl.dist.ray_rank import ENTRY, Failure, Place, RankActor
from agentrl.dist.ray_transport import FETCH_TIMEOUT_S, Sender, pack, unpack
from agentrl.dist.rollout_worker import ProcessSetup
from agentrl.dist.watchdog import (
    ask_stacks,
    innermost_frame,
    late_ranks,
    stack_of_call,
)
from agentrl.dist.worker import Worker, call_spec
from agentrl.errors import WorkerError, WorkerLost, WorkerTimeout

logger = logging.getLogger(__name__)

_GONE = (RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, ObjectLostError)
_GRACE_S = 2.0
"""For the death of a rank to be known, where another one complains of a lost connection."""
_STACKS_TIMEOUT_S = 30.0


@dataclass(slots=True, frozen=True, kw_only=True)
class RayOptions:
    """How a group starts, and how long its calls may take."""

    start_timeout_s: float = 300.0
    """For all ranks to be placed, and their workers built."""
    call_timeout_s: float | None = None
    """Deadline of every call, in place of that of its method."""
    setup: ProcessSetup | None = None
    """What ranks take over; None: the driver's paths and settings, a thread for each CPU."""


@dataclass(slots=True, frozen=True)
class _Rank:
    actor: Any
    place: Place


class RayWorkerGroup:
    """A :class:`~agentrl.dist.worker_group.WorkerGroup` of Ray actors.

    Nothing is restarted and no call is made twice: a rank holds state that its process alone has,
    and others wait for it. Whoever needs the group again builds one, and loads a checkpoint.

    Args:
        worker_class: of the workers, built on every rank in its own process.
        args: its arguments after ``ranks``, as are ``kwargs``.
        pool: how many ranks there are, what each takes, and how they are spread.
        options: deadlines and set-up.

    Raises:
        WorkerTimeout: not all ranks were there in time.
        WorkerError: a worker could not be built.
        AgentRLError: as a worker's constructor raised it.
    """

    def __init__(
        self,
        worker_class: type[Worker],
        *args: Any,
        pool: PoolConfig,
        options: RayOptions | None = None,
        **kwargs: Any,
    ) -> None:
        self._worker_class = worker_class
        self._pool = pool
        self._options = options or RayOptions()
        self._lock = threading.RLock()
        self._ended: str | None = None
        self._ranks: list[_Rank] = []
        self._actors: list[Any] = []
        self._placement: PlacementGroup | None = None
        self._layout = Layout(pool.ranks, self._ask_data_ranks)
        deadline = time.monotonic() + self._options.start_timeout_s
        with self._ending_on_error("start"):
            self._start_actors(self._reserve(deadline), deadline)
            self._build(Call(args, kwargs), deadline)

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self._pool.ranks

    # ------------------------------------------------------------------ calls

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`~agentrl.dist.worker_group.WorkerGroup.call`. May be called in any thread."""
        self._refuse_ended(method)
        spec = call_spec(self._worker_class, method)
        calls = spec.dispatch.split(Call(args, kwargs), self._layout)
        with self._ending_on_error(method):
            waiting = self._submit(calls, lambda rank: rank.actor.call.remote, method)
            found = self._gather(waiting, method, self._timeout_s(spec.timeout_s))
        results = [unpack(found.get(rank)) for rank in range(self.world_size)]
        return spec.dispatch.collect(results, calls, self._layout)

    def keep(self, method: str, /, *args: Any, **kwargs: Any) -> list[Handle]:
        """See :meth:`~agentrl.dist.worker_group.WorkerGroup.keep`."""
        self._refuse_ended(method)
        spec = call_spec(self._worker_class, method)
        calls = spec.dispatch.split(Call(args, kwargs), self._layout)
        with self._ending_on_error(method):
            both = self._submit(
                calls, lambda rank: rank.actor.keep.options(num_returns=2).remote, method
            )
            layouts = {rank: layout for rank, (layout, _) in both.items()}
            found = self._gather(layouts, method, self._timeout_s(spec.timeout_s))
        return [Handle(both[rank][1], unpack(found[rank])) for rank in sorted(both)]

    def put(self, value: Any) -> Handle:
        """See :meth:`~agentrl.dist.worker_group.WorkerGroup.put`."""
        return Handle(ray.put(pack(value)), getattr(value, "cu_seqlens", None))

    def shutdown(self) -> None:
        """End the ranks' processes and give back what was reserved. Idempotent."""
        self._end("it was shut down")

    def _submit(
        self, calls: Sequence[Call | None], remote: Callable[[_Rank], Any], method: str
    ) -> dict[int, Any]:
        """Send every rank its call; returns rank -> Ray's reference."""
        sender = Sender()
        # Under a lock, since ranks that took two calls in different orders would wait for ever.
        with self._lock:
            self._refuse_ended(method)
            messages = {
                rank: sender.message(call) for rank, call in enumerate(calls) if call is not None
            }
            return {
                rank: remote(self._ranks[rank])(method, message, *bulk)
                for rank, (message, bulk) in messages.items()
            }

    def _refuse_ended(self, method: str) -> None:
        if self._ended is not None:
            raise WorkerError(f"{method}: the group has ended: {self._ended}")

    def _ask_data_ranks(self, mesh: str | None) -> list[int]:
        with self._ending_on_error("data_rank"):
            waiting = {r: one.actor.data_rank.remote(mesh) for r, one in enumerate(self._ranks)}
            found = self._gather(waiting, "data_rank", self._timeout_s(60.0))
        return [found[rank] for rank in range(self.world_size)]

    def _timeout_s(self, default: float) -> float:
        limit = self._options.call_timeout_s
        return default if limit is None else limit

    # ------------------------------------------------------------------ answers

    def _gather(self, waiting: Mapping[int, Any], method: str, timeout_s: float) -> dict[int, Any]:
        """Wait for the answers of all ranks, but not after one of them has failed.

        Returns:
            Rank -> answer.
        """
        deadline = time.monotonic() + timeout_s
        rank_of = {reference: rank for rank, reference in waiting.items()}
        answers: dict[int, Any] = {}
        while rank_of:
            ready, _ = ray.wait(list(rank_of), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._raise_late(sorted(rank_of.values()), method, timeout_s)
            rank = rank_of.pop(ready[0])
            answer = self._answer(ready[0], rank, method)
            if isinstance(answer, Failure):
                if answer.is_of_peer:
                    self._raise_if_lost(rank_of, method)
                self._raise(answer, rank, method)
            answers[rank] = answer
        return answers

    def _answer(self, reference: Any, rank: int, method: str) -> Any:
        try:
            return ray.get(reference, timeout=FETCH_TIMEOUT_S)
        except GetTimeoutError as error:
            raise WorkerTimeout(
                f"{self._label(rank)}: {method} is done, but its result did not arrive within "
                f"{FETCH_TIMEOUT_S:g} s; look at the network between the nodes"
            ) from error
        except _GONE as error:
            raise WorkerLost(
                f"{self._label(rank)} is gone, while it ran {method}: {_cause_of_death(error)}"
            ) from error
        except RayError as error:  # arguments or result could not be read where they arrived
            label = self._label(rank)
            raise WorkerError(f"{label}: {method} failed outside the worker:\n{error}") from error

    def _raise_if_lost(self, rank_of: Mapping[Any, int], method: str) -> None:
        """Raise WorkerLost if a rank's process has ended, which is why another one complains."""
        pending = dict(rank_of)
        deadline = time.monotonic() + _GRACE_S
        while pending:
            ready, _ = ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            self._answer(ready[0], pending.pop(ready[0]), method)

    def _raise(self, failure: Failure, rank: int, method: str) -> NoReturn:
        cause = WorkerError(
            f"{self._label(rank)}: {self._worker_class.__name__}.{method} raised {failure.error}\n"
            f"\n{failure.trace}"
        )
        if failure.original is not None:
            raise failure.original from cause
        raise cause

    def _raise_late(self, waiting: list[int], method: str, timeout_s: float) -> NoReturn:
        stacks = {rank: stack_of_call(text, ENTRY) for rank, text in self._stacks().items()}
        late = late_ranks({rank: stacks[rank] for rank in waiting})
        others = [rank for rank in waiting if rank not in late]
        stands = ", ".join(f"{self._label(r)} in {innermost_frame(stacks[r])}" for r in late)
        raise WorkerTimeout(
            f"{method} was not done after {timeout_s:g} s: late is {stands}"
            + (f"; waiting for it in a collective: {_numbers(others)}" if others else "")
            + ". The stacks of all ranks:\n"
            + "\n".join(f"\n--- {self._label(r)}\n{text}" for r, text in sorted(stacks.items()))
        )

    def _stacks(self) -> dict[int, str]:
        """Return every rank's stacks, asked for on its own node; never raises."""
        here = ray.get_runtime_context().get_node_id()
        ask = ray.remote(num_cpus=0, max_retries=0)(ask_stacks)
        texts: dict[int, Any] = {}
        for number, rank in enumerate(self._ranks):
            node = rank.place.node_id
            if node == here:
                texts[number] = ask_stacks(rank.place.stacks)
            else:
                strategy = NodeAffinitySchedulingStrategy(node, soft=False)
                texts[number] = ask.options(scheduling_strategy=strategy).remote(rank.place.stacks)
        deadline = time.monotonic() + _STACKS_TIMEOUT_S
        for number, text in texts.items():
            if not isinstance(text, str):
                try:
                    texts[number] = ray.get(text, timeout=max(0.1, deadline - time.monotonic()))
                except RayError as error:
                    texts[number] = f"no stack: its node could not be asked ({error})"
        return texts

    def _label(self, rank: int) -> str:
        label = f"rank {rank} of {self.world_size}"
        if rank < len(self._ranks):
            place = self._ranks[rank].place
            label += f" (process {place.stacks.pid} on {place.host})"
        return label

    # ------------------------------------------------------------------ start and end

    def _reserve(self, deadline: float) -> PlacementGroup:
        """Reserve what the ranks take.

        Raises:
            WorkerTimeout: the cluster has not got it free.
        """
        pool = self._pool
        need = {"CPU": pool.cpus_per_rank, "GPU": pool.gpus_per_rank}
        bundle = {kind: amount for kind, amount in need.items() if amount}
        placement = placement_group([bundle] * pool.ranks, strategy=pool.strategy)
        self._placement = placement
        if not placement.wait(timeout_seconds=max(0.0, deadline - time.monotonic())):
            free = ray.available_resources()
            raise WorkerTimeout(
                f"{pool.ranks} ranks with {_in_words(need)} each ({pool.strategy}) found no room "
                f"within {self._options.start_timeout_s:g} s; free in the whole cluster: "
                f"{_in_words({kind: free.get(kind, 0.0) for kind in need})}. Lower what the pool "
                "takes, or end what runs beside it"
            )
        return placement

    def _start_actors(self, placement: PlacementGroup, deadline: float) -> None:
        pool = self._pool
        threads = max(1, int(pool.cpus_per_rank))
        setup = self._options.setup or ProcessSetup.of_this_process(num_threads=threads)
        actor = ray.remote(RankActor)
        for index in range(pool.ranks):
            strategy = PlacementGroupSchedulingStrategy(placement, index)
            options = actor.options(
                num_cpus=pool.cpus_per_rank,
                num_gpus=pool.gpus_per_rank,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=strategy,
            )
            self._actors.append(options.remote(setup))
        waiting = {i: actor.where.remote() for i, actor in enumerate(self._actors)}
        places = self._gather(waiting, "start", max(0.0, deadline - time.monotonic()))
        # Neighbouring ranks, which share sequences and shards, are to be on one node.
        order = sorted(places, key=lambda i: (places[i].host, places[i].gpus, i))
        self._ranks = [_Rank(self._actors[i], places[i]) for i in order]

    def _build(self, call: Call, deadline: float) -> None:
        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        address = None
        if self.world_size > 1:
            asked = {0: self._ranks[0].actor.meeting_place.remote()}
            address = self._gather(asked, "meeting_place", left())[0]
        device = "cuda:0" if self._pool.gpus_per_rank else "cpu"  # Ray shows a rank its own GPU
        message, bulk = Sender().message(call)
        waiting = {}
        for number, rank in enumerate(self._ranks):
            place = {"rank": number, "world_size": self.world_size, "device": device}
            waiting[number] = rank.actor.build.remote(
                address, place, self._worker_class, message, *bulk
            )
        self._gather(waiting, "__init__", left())

    @contextmanager
    def _ending_on_error(self, method: str) -> Iterator[None]:
        """End the group on any error: its ranks may wait for each other, or stand apart."""
        try:
            yield
        except BaseException as error:
            first = str(error).split("\n", 1)[0]
            self._end(f"{method}: {type(error).__name__}: {first}")
            raise

    def _end(self, cause: str) -> None:
        with self._lock:
            self._ended = self._ended or cause
            actors, self._actors = self._actors, []
            placement, self._placement = self._placement, None
        if not ray.is_initialized():
            return  # Ray was ended, and everything with it
        for actor in actors:
            with suppress(RayError, ValueError):
                ray.kill(actor)
        if placement is not None:
            with suppress(RayError, ValueError):
                remove_placement_group(placement)


def _cause_of_death(error: RayError) -> str:
    """Return what Ray knows of the end of a process, in a line."""
    text = " ".join(str(error).split())
    if isinstance(error, RayActorError) and "Worker exit type" in text:
        text = text[text.index("Worker exit type") :].split(" Some common causes")[0]
    return f"{text} (out of memory? look at the kernel's log of that node)"


def _in_words(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}s" for kind, amount in resources.items())


def _numbers(ranks: list[int]) -> str:
    return "ranks " + ", ".join(map(str, ranks)) if len(ranks) > 1 else f"rank {ranks[0]}"
