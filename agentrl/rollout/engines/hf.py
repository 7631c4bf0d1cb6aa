"""In-process rollout on a ``transformers`` model, with continuous batching across sessions.

Llama, Qwen2 and Qwen3 run on a decoder of our own (:mod:`.hf_decoder`), everything else on
``transformers``' forward (:mod:`.hf_fallback`). The scheduler (:mod:`.hf_scheduler`) lets requests
join and leave the running batch and keeps each session's keys and values from turn to turn.

**Determinism** (``deterministic=True``, the default). A request's ids and log-probabilities are
bit-identical whatever else runs and in whatever order requests arrive: sampling is counter-based,
and the model is computed only in shapes that were found, at start, to give the same bits
(:mod:`.hf_shapes`). So it is also the same whether a prefix was decoded, prefilled, copied from
another session, or forgotten and prefilled again. On ``transformers``' forward the result depends
on the session's own history of calls, and nothing else. All of it holds for one machine, one
number of threads, and one engine configuration.

**Where the work runs.** On one worker thread, in bursts: the thread steps until nothing is left to
do, takes in new requests between steps, and posts what ended to the event loop. Steps inside the
event loop, and steps handed to an executor one by one, were compared with it under 256 agent loops
that compute a little and talk to pipes between turns (``benchmarks/hf_engine.py``). Throughput does
not tell the three apart on a quiet machine. On a busy one, steps inside the event loop ran emptier
batches (45 instead of 55 of 64 rows), since pipes were looked at once a step only; and they would
hold up every deadline for as long as a step of a larger model takes.

Set ``OMP_WAIT_POLICY=PASSIVE`` before torch is imported where other processes share the cores:
spinning OpenMP threads have cost a factor of 100 on a busy machine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from agentrl.errors import AgentRLError, EngineError, EngineLost
from agentrl.rollout.engines.config import HFEngineConfig
from agentrl.rollout.engines.hf_decoder import StaticDecoder
from agentrl.rollout.engines.hf_fallback import TransformersRunner
from agentrl.rollout.engines.hf_runner import Runner
from agentrl.rollout.engines.hf_scheduler import Job, Outcome, Scheduler, SchedulerStats
from agentrl.rollout.engines.hf_sessions import SessionTable
from agentrl.rollout.engines.hf_shapes import ShapePlan, candidates, probe
from agentrl.rollout.engines.hf_weights import refusal
from agentrl.rollout.engines.request_checks import check_request
from agentrl.rollout.engines.setting_checks import check_settings
from agentrl.types import GenerateRequest, Generation
from agentrl.weights.checksum import checksums
from agentrl.weights.served import ServedWeights, WeightSpec

SMALL_MODEL_PARAMETERS = 5_000_000
"""Below this one thread is faster than two: the operations are shorter than a hand-over."""


class HFEngine:
    """A :class:`~agentrl.rollout.engine.RolloutEngine` over one module in this process.

    Args:
        model: a causal language model of ``transformers``. The engine owns it: hand over a copy
            where a trainer changes the original.
        config: settings.
        policy_version: version of the model's weights.

    Raises:
        ConfigError: a setting that cannot work.
    """

    def __init__(
        self, model: Any, config: HFEngineConfig | None = None, *, policy_version: int = 0
    ) -> None:
        self.config = config or HFEngineConfig()
        check_settings(self.config)
        self.policy_version = policy_version
        self._model = model
        self._runner: Runner | None = None
        self._scheduler: Scheduler | None = None
        self._plan: ShapePlan | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._num_threads = 1
        self._asleep = self._closed = False
        self._jobs: dict[str, tuple[Job, asyncio.Future[Generation]]] = {}
        self._inbox: deque[Job | str] = deque()
        """Requests, and ids of sessions that end, in order of arrival."""

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Build the decoder, find the shapes that may be used, and start the batch loop.

        Raises:
            EngineError: deterministic results are impossible on this machine, or started twice.
        """
        if self._pool is not None or self._closed:
            raise EngineError("the engine was started before; build a new one")
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-engine")
        self._num_threads = threads_for(self._model, self.config)
        # As it will serve: the bits of a kernel may depend on the number of threads.
        loop, before = asyncio.get_running_loop(), torch.get_num_threads()

        def build() -> tuple[Runner, ShapePlan | None]:
            with _threads(self._num_threads, before):
                return _build(self._model, self.config)

        self._runner, self._plan = await loop.run_in_executor(self._pool, build)
        self._scheduler = self._new_scheduler()
        self._wake, self._gate, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._idle.set()
        self._task = asyncio.create_task(self._loop(), name="hf-engine")

    def _new_scheduler(self) -> Scheduler:
        assert self._runner is not None
        exact = self._runner.prefix_exact or not self.config.deterministic
        table = SessionTable(
            self._runner,
            cache_bytes=self.config.session_cache_mb << 20,
            share_prefixes=self._runner.prefix_exact,
            may_forget=exact,
        )
        scheduler = Scheduler(
            self._runner, plan=self._plan, prefill_tokens=self.config.prefill_tokens, table=table
        )
        scheduler.policy_version = self.policy_version
        return scheduler

    @property
    def shapes(self) -> ShapePlan | None:
        """The shapes in use; None where any shape may come."""
        return self._plan

    @property
    def stats(self) -> SchedulerStats:
        """What was computed since the start."""
        return self._running().stats

    def _running(self) -> Scheduler:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise EngineError("the engine is closed; start a new one")
        if self._scheduler is None:
            raise EngineError("the engine is not started; await engine.start() first")
        return self._scheduler

    async def check_health(self) -> None:
        """See :class:`~agentrl.rollout.engine.RolloutEngine`; what broke the loop is the cause."""
        if self._failure is not None:
            raise EngineLost(str(self._failure)) from self._failure
        if self._closed or self._scheduler is None:
            raise EngineLost("the engine is not running: it was closed, or never started")

    async def close(self) -> None:
        """Fail unfinished requests and stop. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._fail_all(EngineError("the engine was closed while the request was unfinished"))
        if self._scheduler is not None:  # whoever waits at either finds the engine closed
            self._idle.set()
            self._gate.set()
        if self._runner is not None:
            self._runner.free()

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one turn; see :class:`~agentrl.rollout.engine.RolloutEngine`.

        Raises:
            EngineError: the request cannot be served as it is, or the engine is closed or asleep.
        """
        self._running()
        assert self._runner is not None
        prompt = check_request(
            request, max_context=self._runner.max_context, vocab_size=self._runner.vocab_size
        )
        while not self._gate.is_set():
            await self._gate.wait()
        self._running()
        if self._asleep:
            raise EngineError("the engine is asleep; await engine.wake() before generating")
        if request.session_id in self._jobs:
            raise EngineError(
                f"session {request.session_id!r} has a request running; await it, or give the "
                "other one a session of its own"
            )
        job = Job(request=request, prompt=prompt)
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._jobs[request.session_id] = job, future
        self._inbox.append(job)
        self._idle.clear()
        self._wake.set()
        try:
            return await future
        except asyncio.CancelledError:
            job.cancelled = True
            self._wake.set()
            raise
        finally:
            if self._jobs.get(request.session_id, (None,))[0] is job:
                del self._jobs[request.session_id]

    async def end_session(self, session_id: str) -> None:
        """Forget a session; a request of it that is running ends as aborted. Idempotent."""
        if self._closed or self._scheduler is None:
            return
        if session_id in self._jobs:
            self._jobs[session_id][0].aborted = True
        self._inbox.append(session_id)
        self._wake.set()

    async def abort(self, session_id: str | None = None) -> int:
        """End a session's request, or all, at the next step with the tokens they have.

        Returns:
            how many requests were told so; they return with ``StopReason.ABORT``.
        """
        ids = list(self._jobs) if session_id is None else [session_id]
        jobs = [self._jobs[name][0] for name in ids if name in self._jobs]
        for job in jobs:
            job.aborted = True
        self._wake.set()
        return len(jobs)

    # ------------------------------------------------------------------ weights, sleep

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return the tensors that are served, under the module's names."""
        self._running()
        assert self._runner is not None
        return [
            WeightSpec(
                name=name,
                shape=tuple(value.shape),
                dtype=str(value.dtype).removeprefix("torch."),
            )
            for name, value in self._runner.named_weights()
        ]

    async def update_weights(
        self, params: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> ServedWeights:
        """Replace the weights in place and drop every cache.

        Requests that arrive meanwhile wait and are served by the new weights.

        Args:
            params: all parameters under the module's names; tied ones once (or equal).
            version: what ``policy_version`` is afterwards.

        Returns:
            what is served afterwards.

        Raises:
            EngineError: a tensor is missing, unknown, of another shape, or not finite (the old
                weights stay whole), or requests are unfinished after ``drain_timeout_s``.
        """
        self._running()
        self._gate.clear()
        try:
            await self._drained()
            scheduler = self._running()
            assert self._runner is not None
            self._runner.assign(params)
            scheduler.drop_cache()
            self.policy_version = scheduler.policy_version = version
            return ServedWeights(version=version, sums=checksums(self._runner.named_weights()))
        finally:
            self._gate.set()

    async def sleep(self, level: int = 1) -> None:
        """Free the cache; weights stay, at either level.

        Raises:
            EngineError: a request is unfinished.
        """
        scheduler = self._running()
        if self._jobs:
            raise EngineError(
                f"sleep: {len(self._jobs)} requests are unfinished; await or abort them first"
            )
        if self._asleep:
            return
        self._asleep = True
        await self._drained()
        scheduler.drop_cache()
        assert self._runner is not None
        self._runner.free()

    async def wake(self) -> None:
        """Allocate the cache again."""
        self._running()
        if self._asleep:
            assert self._runner is not None
            self._runner.allocate()
            self._asleep = False

    async def _drained(self) -> None:
        """Wait until nothing is unfinished."""
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self._idle.wait()
        except TimeoutError:
            raise EngineError(
                f"{len(self._jobs)} requests are still unfinished after "
                f"{self.config.drain_timeout_s} s; abort them, or raise drain_timeout_s"
            ) from None
        self._running()

    # ------------------------------------------------------------------ batch loop

    async def _loop(self) -> None:
        scheduler = self._running()
        try:
            while True:
                self._take_inbox(scheduler)
                if not scheduler.num_unfinished:
                    self._idle.set()
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await self._advance(scheduler)
        except Exception as error:  # whatever breaks a step has lost every running request
            failure = EngineError(f"the rollout engine broke: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._failure = failure
            self._fail_all(failure)
            self._idle.set()

    async def _advance(self, scheduler: Scheduler) -> None:
        """Step until nothing is unfinished."""
        loop, before = asyncio.get_running_loop(), torch.get_num_threads()
        await loop.run_in_executor(self._pool, self._burst, scheduler, loop, before)

    def _burst(
        self, scheduler: Scheduler, loop: asyncio.AbstractEventLoop, num_threads_before: int
    ) -> None:
        """Run on the worker thread, which alone touches the scheduler meanwhile.

        The number of torch threads is a setting of the process. It is put back before the last
        result is posted, so that whoever computes next finds it as it was.
        """
        with _threads(self._num_threads, num_threads_before):
            while scheduler.num_unfinished and not self._closed:
                ended = scheduler.step()
                self._take_inbox(scheduler)
                if not scheduler.num_unfinished:
                    torch.set_num_threads(num_threads_before)
                if ended:
                    loop.call_soon_threadsafe(self._deliver, ended)

    def _take_inbox(self, scheduler: Scheduler) -> None:
        """Hand over what arrived while the last step ran."""
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, str):
                scheduler.end_session(entry)
            elif not entry.cancelled:
                scheduler.submit(entry)

    def _deliver(self, ended: list[tuple[Job, Outcome]]) -> None:
        for job, outcome in ended:
            known, future = self._jobs.get(job.request.session_id, (None, None))
            if known is not job or future is None or future.done():
                continue
            if isinstance(outcome, AgentRLError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _fail_all(self, error: EngineError) -> None:
        for _, future in self._jobs.values():
            if not future.done():
                future.set_exception(EngineError(str(error)))


@contextmanager
def _threads(count: int, before: int) -> Iterator[None]:
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(model: Any, config: HFEngineConfig) -> int:
    """Return how many threads an engine computes with, called where torch has its usual number."""
    if config.num_threads is not None:
        return config.num_threads
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return 1 if num_parameters < SMALL_MODEL_PARAMETERS else torch.get_num_threads()


def _build(model: Any, config: HFEngineConfig) -> tuple[Runner, ShapePlan | None]:
    """Choose the runner for a model, and the shapes it may compute in."""
    model.eval()
    device = next(model.parameters()).device
    if config.device != "auto":
        device = torch.device(config.device)
    if refusal(model, config.max_context) is not None:
        model.to(device=device, dtype=getattr(torch, config.dtype))
        runner = TransformersRunner(
            model, num_rows=config.num_slots, max_context=config.max_context
        )
        return runner, None
    decoder = StaticDecoder(
        model,
        num_rows=config.num_slots,
        max_context=config.max_context,
        device=device,
        dtype=getattr(torch, config.dtype),
    )
    if not config.deterministic:
        return decoder, None
    wanted = candidates(config.num_slots, config.max_context, config.prefill_tokens)
    return decoder, probe(decoder, wanted)
