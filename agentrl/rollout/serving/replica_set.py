"""Several engines behind the face of one.

**Routing** and the rule by which a session leaves the replica that knows its prompt:
:mod:`.routing`. A replica works at ``max_requests`` requests at most; others wait in one line,
first come, first served, and are woken by events (:mod:`.dispatcher`).

**Weights.** An update is a barrier (:mod:`.control`). The gate is shut, so that no request starts;
then either every turn is waited for, or, with ``interrupt``, every turn is aborted, and comes back
with the tokens it has. Only when each call to each engine has returned are the weights replaced, in
all replicas; then the gate opens. Interrupted turns keep their place in the line and go on with
what is missing (:mod:`.turn`). So all replicas that serve at a time serve one version, and the
versions of a turn's tokens never fall. Where replacing fails, nobody serves until an update
succeeds.

**Loss.** A turn whose engine is lost goes on elsewhere: from the last token received where the
engine had streamed it, else from what earlier engines had returned of it, which is the last
completed turn if they had returned nothing. With seeds that count tokens it says the same again.
The replica is started again (:mod:`.supervisor`) and serves once it holds the weights of the
policy: those that ``republish`` gives it and the checksums confirm, or those of the next update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError, EngineError, EngineLost
from agentrl.rollout.serving.config import ServingConfig, serving_problems
from agentrl.rollout.serving.control import Control, Republish
from agentrl.rollout.serving.dispatcher import Dispatcher
from agentrl.rollout.serving.routing import Router
from agentrl.rollout.serving.stats import MetricsEndpoint, ServingStats, metrics
from agentrl.rollout.serving.supervisor import Spawn, State, Supervisor
from agentrl.types import GenerateRequest, Generation
from agentrl.weights.served import ServedWeights, WeightSpec

if TYPE_CHECKING:
    import torch

    from agentrl.weights.channels.base import Address
    from agentrl.weights.plan import BucketPlan

DEFAULT_BUCKET_BYTES = 256 << 20


class ReplicaSet:
    """A :class:`~agentrl.rollout.engine.RolloutEngine` over replicas of another.

    Also a :class:`~agentrl.weights.push.WeightSink`, where its replicas are.

    An engine whose ``policy_version`` is below 0 after its start has no weights, and serves after
    the first update.

    Args:
        spawn: number of a replica -> an engine that is not started yet; called again for a replica
            that was lost.
        num_replicas: of them.
        config: settings.
        republish: gives a replica that was started again the weights that were published last, by
            ``update_weights`` of the engine it is given. Without it, or where the weights it gives
            are others, the replica waits for the next update.
        bucket_bytes: of weights that travel at once to several replicas which take buckets.

    Raises:
        ConfigError: a setting that cannot work.
    """

    def __init__(
        self,
        spawn: Spawn,
        num_replicas: int = 1,
        config: ServingConfig | None = None,
        *,
        republish: Republish | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.config = config or ServingConfig()
        problems = list(serving_problems(self.config))
        if num_replicas < 1:
            problems.append(f"{num_replicas} replicas: there must be at least 1")
        if problems:
            raise ConfigError("\n".join(problems))
        self.stats = ServingStats()
        self._router = Router(
            affinity_slack=self.config.affinity_slack, affinity_tokens=self.config.affinity_tokens
        )
        self._supervisor = Supervisor(
            spawn,
            num_replicas,
            self.config,
            arm=lambda replica: self._control.arm(replica),
            on_change=lambda: self._dispatcher.replicas_changed(),
            on_lost=self._router.forget_replica,
        )
        self._dispatcher = Dispatcher(
            self._supervisor, self._router, self.config, self.stats, nobody=self._nobody
        )
        self._control = Control(
            self._supervisor,
            self._dispatcher,
            self.config,
            republish,
            bucket_bytes=bucket_bytes,
        )
        self._endpoint: MetricsEndpoint | None = None
        self._started = self._closed = False

    @property
    def policy_version(self) -> int:
        """Version of the weights that are being sampled; below 0 where there are none yet."""
        return self._control.version

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start every replica.

        Raises:
            EngineError: one did not start, or the metrics' port is taken; all are closed.
        """
        if self._started or self._closed:
            raise EngineError("the replicas were started before; build a new set")
        await self._supervisor.start()
        if self.config.metrics_port:
            await self._open_endpoint()
        self._started = True
        self._control.started()

    async def _open_endpoint(self) -> None:
        self._endpoint = MetricsEndpoint(self.config.metrics_port)
        try:
            await self._endpoint.open(self.metrics)
        except OSError as error:
            await self._supervisor.close()
            raise EngineError(
                f"rollout.serving.metrics_port={self.config.metrics_port}: {error}; choose "
                "another, or 0 for none"
            ) from error

    async def close(self) -> None:
        """Fail unfinished requests and stop every replica. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._endpoint is not None:
            await self._endpoint.close()
        self._dispatcher.fail_line(_closed_error)
        await self._supervisor.close()
        self._control.close()

    async def check_health(self) -> None:
        """Return while a replica serves, or may serve again.

        Raises:
            EngineLost: all are gone for good.
        """
        if self._closed or not self._started:
            raise EngineLost("the replicas are not running: they were closed, or never started")
        if not self._supervisor.running() and not self._supervisor.hopeful:
            raise EngineLost(self._all_gone())

    def metrics(self) -> dict[str, float]:
        """Return flat numbers under ``serving/``; counts are since the start."""
        self.stats.restarts = self._supervisor.num_restarts
        self.stats.updates = self._control.num_updates
        self.stats.affinity_kept = self._router.num_kept
        self.stats.affinity_moved = self._router.num_moved
        replicas = self._supervisor.replicas
        return metrics(
            self.stats,
            running={replica.number: replica.requests for replica in replicas},
            waiting=self._dispatcher.num_waiting,
            serving=sum(replica.state is State.SERVING for replica in replicas),
        )

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one turn, on as many replicas as it takes.

        Raises:
            EngineError: the request cannot be served as it is, no result came within
                ``request_timeout_s``, or the set is closed, asleep or without weights.
            EngineLost: more replicas than ``max_replays`` were lost under it, or all are gone.
        """
        return await self._dispatcher.generate(request)

    async def end_session(self, session_id: str) -> None:
        """Forget a session; a request of it that is unfinished ends as aborted. Idempotent."""
        await self._dispatcher.end_session(session_id)

    async def abort(self, session_id: str | None = None) -> int:
        """End a session's request, or all, with the tokens they have.

        Returns:
            how many requests were told so; they return with ``StopReason.ABORT``, unless they end
            by themselves first.
        """
        return await self._dispatcher.abort(session_id)

    def _nobody(self) -> EngineError | None:
        """Return why no request can be served, unless that may change by itself."""
        if self._closed:
            return _closed_error()
        if not self._started:
            return EngineError("the replicas are not started; await start() first")
        if self._control.sleep_level:
            return EngineError("the replicas are asleep; await wake() before generating")
        if self._supervisor.hopeful or self._control.busy:
            return None
        if not self._supervisor.running():
            return EngineLost(self._all_gone())
        if self._control.broken is not None:
            return EngineError(self._control.broken)
        last = self._supervisor.last_loss
        since = f", since one was lost ({last})" if last else ""
        return EngineError(
            f"no replica holds the policy's weights{since}: push them with update_weights, or give "
            "the set a republish"
        )

    def _all_gone(self) -> str:
        return (
            f"every replica is gone, after rollout.serving.max_restarts="
            f"{self.config.max_restarts} restarts; the last loss: {self._supervisor.last_loss}"
        )

    def _refuse_idle(self) -> None:
        if self._closed or not self._started:
            raise EngineError("the replicas are not running: they were closed, or never started")

    # ------------------------------------------------------------------ weights

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return the tensors that every replica serves; known once started."""
        return self._control.weight_specs()

    async def update_weights(
        self,
        params: Iterable[tuple[str, torch.Tensor]],
        version: int,
        *,
        interrupt: bool | None = None,
    ) -> ServedWeights:
        """Replace the weights of every replica, none of which works at a request meanwhile.

        Args:
            params: see :class:`~agentrl.rollout.engine.RolloutEngine`; read once.
            version: what ``policy_version`` is afterwards.
            interrupt: interrupt what is being generated, and go on with it under the new weights;
                None does as ``config.interrupt_updates`` says.

        Raises:
            EngineError: the weights were refused, replicas serve different ones afterwards, or
                requests were unfinished after ``drain_timeout_s`` (the old weights then serve on);
                or the set is asleep.
            EngineLost: no replica is left that could load them.
        """
        self._refuse_idle()
        return await self._control.update(params, version, interrupt=interrupt)

    def no_requests(self, *, interrupt: bool | None = None) -> AbstractAsyncContextManager[None]:
        """Hold the gate shut, with nothing unfinished in any engine.

        Args:
            interrupt: see :meth:`update_weights`.

        Raises:
            EngineError: on entering, requests were unfinished after ``drain_timeout_s``.
        """
        self._refuse_idle()
        return self._control.no_requests(interrupt=interrupt)

    @property
    def num_receivers(self) -> int:
        """See :class:`~agentrl.weights.push.WeightSink`: of all replicas together.

        0 where they are engines that take no buckets: use :meth:`update_weights` then.
        """
        return self._control.num_receivers

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """Open the receiving side of a channel in every replica."""
        self._refuse_idle()
        await self._control.connect(plan, address)

    async def begin_update(self) -> None:
        """Shut the gate, wait for or interrupt what is unfinished, and hold the gate shut.

        Raises:
            EngineError: requests were unfinished after ``drain_timeout_s``; the set is asleep; or
                replicas were replaced, and the transport lets none join later: connect again.
        """
        self._refuse_idle()
        await self._control.begin_update()

    async def load_bucket(self, index: int) -> None:
        """Load a bucket into every replica; a lost one does not keep the others from it."""
        await self._control.load_bucket(index)

    async def finish_update(self, version: int) -> ServedWeights:
        """Let every replica serve what was loaded, and open the gate.

        Raises:
            EngineError: replicas serve different weights.
            EngineLost: all were lost on the way.
        """
        return await self._control.finish_update(version)

    async def give_up_update(self, reason: str) -> None:
        """Tell who waits for the end of an update that none comes; nothing where none is on."""
        await self._control.give_up_update(reason)

    # ------------------------------------------------------------------ sleep

    async def sleep(self, level: int = 1) -> None:
        """Have every replica free what training needs.

        Raises:
            EngineError: a request is unfinished.
        """
        self._refuse_idle()
        await self._control.sleep(level)

    async def wake(self) -> None:
        """Undo :meth:`sleep`, in every replica."""
        self._refuse_idle()
        await self._control.wake()


def _closed_error() -> EngineError:
    return EngineError("the replicas were closed; unfinished requests end with them")
