"""Rollout on an SGLang server, by its native API: token ids in, token ids out.

Written against SGLang 0.5.16. What its API does otherwise than one would think, and what is done
about it here (of how it samples in ``sglang_api``, of weights in ``sglang_served``):

* ``/abort_request`` aborts every request whose id begins alike: ids are of one length here.
* An abort is not acknowledged, and overtakes requests that are on their way. Requests are over when
  their answers are here, and the server has nothing left when it flushes its cache, which it does
  only then: that is how an update and sleep make sure. ``/pause_generation`` would look once a
  second.
* An update under running requests ends the server. The gate is shut before.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch

from agentrl.errors import ConfigError, EngineError, EngineLost
from agentrl.rollout.engines.answers import check_length
from agentrl.rollout.engines.config import SGLangEngineConfig
from agentrl.rollout.engines.http import JsonClient, NoAnswer, Reply, Unreachable
from agentrl.rollout.engines.request_checks import check_request
from agentrl.rollout.engines.setting_checks import check_settings
from agentrl.rollout.engines.sglang_api import (
    OpenTurn,
    flush_until_nothing_runs,
    how_ended,
    read_answer,
    sampling_body,
)
from agentrl.rollout.engines.sglang_served import refuse_other_model, served_specs
from agentrl.rollout.engines.sglang_server import ServerProcess, wait_until_ready
from agentrl.rollout.engines.sglang_weights import TensorHandover, packed
from agentrl.types import GenerateRequest, Generation, SamplingParams, StopReason
from agentrl.weights.channels import open_receiver
from agentrl.weights.channels.base import Address, Receiver
from agentrl.weights.plan import BucketPlan, ordered_like
from agentrl.weights.served import ServedWeights, WeightSpec

NO_WEIGHTS = -1
_ABORT_AGAIN_S = 1.0


class SGLangEngine:
    """A :class:`~agentrl.rollout.engine.RolloutEngine` and ``WeightSink`` over one server.

    Args:
        model: a causal language model of ``transformers``, whose names and shapes are read.
        config: settings.
        index: of the replica; its server listens at ``port`` plus this.

    Raises:
        ConfigError: a setting that cannot work.
    """

    num_receivers = 1

    def __init__(
        self, model: Any, config: SGLangEngineConfig | None = None, *, index: int = 0
    ) -> None:
        self.config = config or SGLangEngineConfig()
        check_settings(self.config)
        port = str(self.config.port + index)
        self._client = JsonClient(
            self.config.base_url.replace("{port}", port),
            api_key_env=self.config.api_key_env,
            max_connections=self.config.max_connections,
        )
        command = [part.replace("{port}", port) for part in self.config.command]
        self._process = ServerProcess(command, self.config.log_path) if command else None
        self._shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        self._model_config = model.config.to_dict()
        self._vocab_size = int(model.config.vocab_size)
        self._specs: list[WeightSpec] = []
        self.policy_version = NO_WEIGHTS
        self._unservable: str | None = None
        self._turns: set[OpenTurn] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self._no_turns, self._gate = asyncio.Event(), asyncio.Event()
        self._no_turns.set()
        self._gate.set()
        self._handover: TensorHandover | None = None
        self._receiver: Receiver | None = None
        self._weight_version: str | None = None
        """What the server is to say with every answer; None before the first update."""
        self._started = self._asleep = self._closed = False

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the server, where it is ours to start, and wait until it is ready.

        Raises:
            ConfigError: the server's settings cannot work, or it serves another model.
            EngineError: it is not ready in time, or lost (EngineLost) as its process ended.
        """
        if self._started or self._closed:
            raise EngineError("the engine was started before; build a new one")
        if self._process is not None:
            await self._process.start()
        info = await wait_until_ready(
            self._client, self._process, timeout_s=self.config.start_timeout_s
        )
        if self.config.deterministic and not info.get("enable_deterministic_inference"):
            raise ConfigError(
                "the SGLang server ignores seeds: start it with --enable-deterministic-inference, "
                "or set deterministic=False"
            )
        self._specs = served_specs(self._shapes, info)
        await refuse_other_model(self._ask, info, self._shapes, self._model_config)
        if info.get("load_format") == "dummy":
            self._unservable = "it was given no weights: await engine.update_weights()"
        else:
            self.policy_version = 0
        self._started = True

    async def check_health(self) -> None:
        """Ask the server; it asks its scheduler.

        Raises:
            EngineLost: its process is gone, or there is no answer.
        """
        self._running()
        try:
            reply = await self._client.get("/health", timeout_s=self.config.health_timeout_s)
        except EngineError as error:
            raise EngineLost(str(error)) from error
        if reply.status != 200:
            raise EngineLost(f"the SGLang server is not healthy: {reply.text}")

    async def close(self) -> None:
        """Fail unfinished requests, and stop the server where it is ours. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._started and self._process is None:  # somebody else's: leave nothing running there
            await self._tell_abort(list(self._turns))
        if self._process is not None:
            await self._process.stop()
        if self._receiver is not None:
            self._receiver.close()
        self._gate.set()
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)
        await self._client.close()

    def _running(self) -> None:
        if self._closed or not self._started:
            raise EngineError("the engine is not running: it was closed, or never started")
        if self._process is not None:
            self._process.check()

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one turn; see :class:`~agentrl.rollout.engine.RolloutEngine`.

        Raises:
            EngineError: the server refused the request, answered something else than was asked
                for, or the engine is closed, asleep or without weights.
            EngineLost: the server is gone.
        """
        self._running()
        prompt = check_request(
            request, max_context=self.config.max_context, vocab_size=self._vocab_size
        ).tolist()
        while not self._gate.is_set():
            await self._gate.wait()
        self._running()
        if self._asleep:
            raise EngineError("the engine is asleep; await engine.wake() before generating")
        if self._unservable is not None:
            raise EngineError(f"the engine has nothing to sample from: {self._unservable}")
        if any(turn.session_id == request.session_id for turn in self._turns):
            raise EngineError(
                f"session {request.session_id!r} has a request running; await it, or give the "
                "other one a session of its own"
            )
        turn, version = OpenTurn(request.session_id), self.policy_version
        self._turns.add(turn)
        self._no_turns.clear()
        try:
            reason = None
            while reason is None:
                reason = await self._go_on(turn, prompt, request.sampling, version)
        except asyncio.CancelledError:
            self._keep(self._abort_one(turn))
            raise
        finally:
            self._turns.discard(turn)
            if not self._turns:
                self._no_turns.set()
        return Generation(
            ids=turn.ids,
            logprobs=turn.logprobs,
            policy_version=[version] * len(turn.ids),
            stop_reason=reason,
            num_cached_tokens=turn.num_cached_tokens,
        )

    async def _go_on(
        self, turn: OpenTurn, prompt: list[int], sampling: SamplingParams, version: int
    ) -> StopReason | None:
        """Ask for what is missing of a turn; returns how it ended, if it has."""
        turn.rid = uuid.uuid4().hex
        body = {
            "rid": turn.rid,
            "input_ids": [*prompt, *turn.ids],
            "sampling_params": sampling_body(
                sampling,
                max_tokens=sampling.max_tokens - len(turn.ids),
                all_tokens=self._vocab_size if self.config.deterministic else -1,
            ),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        reply = await self._post("/generate", body, timeout_s=self.config.request_timeout_s)
        where = self._client.base_url
        ids, logprobs, meta = read_answer(reply, vocab_size=self._vocab_size, where=where)
        served = meta.get("weight_version")
        if self._weight_version not in (None, served):
            raise EngineError(
                f"stale policy: the SGLang server samples version {served!r}, not {version}"
            )
        if turn.num_cached_tokens is None:
            turn.num_cached_tokens = meta.get("cached_tokens")
        turn.ids += ids
        turn.logprobs += logprobs
        check_length(turn.ids, sampling, where=where)
        return how_ended(turn, meta["finish_reason"], sampling, num_new=len(ids))

    async def end_session(self, session_id: str) -> None:
        """Abort a request of the session; its prefix leaves the cache by age."""
        await self.abort(session_id)

    async def abort(self, session_id: str | None = None) -> int:
        """End a session's request, or all, with the tokens they have.

        Returns:
            how many requests were told so.
        """
        turns = [turn for turn in self._turns if session_id in (None, turn.session_id)]
        await self._tell_abort(turns)
        return len(turns)

    async def _tell_abort(self, turns: Sequence[OpenTurn]) -> None:
        for turn in turns:
            turn.aborted = True
        await asyncio.gather(*(self._abort_one(turn) for turn in turns))
        if turns and not self._closed:
            self._keep(self._abort_again(turns))

    async def _abort_again(self, turns: Sequence[OpenTurn]) -> None:
        """Say it again while turns go on: an abort may overtake its request."""
        while left := [turn for turn in turns if turn in self._turns]:
            await asyncio.sleep(_ABORT_AGAIN_S)
            await asyncio.gather(*(self._abort_one(turn) for turn in left))

    async def _abort_one(self, turn: OpenTurn) -> None:
        with suppress(EngineError):  # its request finds out what became of the server
            await self._client.post(
                "/abort_request", {"rid": turn.rid}, timeout_s=self.config.call_timeout_s
            )

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Reply:
        reply = await self._ask(path, body, timeout_s=timeout_s)
        if reply.status != 200:
            raise EngineError(f"{self._client.base_url}{path}: {reply.text}")
        return reply

    async def _ask(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Reply:
        limit_s = self.config.call_timeout_s if timeout_s is None else timeout_s
        try:
            return await self._client.post(path, body, timeout_s=limit_s)
        except Unreachable as error:
            if self._closed:
                raise EngineError("the engine was closed while a request was unfinished") from error
            log = "" if self._process is None else f"; the end of its log: {self._process.log_end}"
            raise EngineLost(f"{error}{log}") from error

    # ------------------------------------------------------------------ weights

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return what is served: names of ``transformers``, tied tensors once."""
        return self._specs

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """Open a channel of buckets.

        Raises:
            EngineError: they hold other tensors than are served.
        """
        self._running()
        pieces = [piece for bucket in plan.buckets for piece in bucket.slices]
        ordered_like(self._specs, ((piece.name, piece.shape) for piece in pieces))
        if self._receiver is not None:
            self._receiver.close()
        self._plan_for(plan)
        self._receiver = await asyncio.to_thread(open_receiver, address, plan, self.config.device)

    def _plan_for(self, plan: BucketPlan) -> TensorHandover:
        if self._handover is None or self._handover.plan != plan:
            self._handover = TensorHandover(
                self._ask,
                plan,
                device=self.config.device,
                num_ranks=self.config.tensor_parallel,
                verify_tensors=self.config.verify_tensors,
            )
        return self._handover

    async def begin_update(self) -> None:
        """Hold new requests back and wait until the server says that it has none.

        Raises:
            EngineError: requests are unfinished after ``drain_timeout_s``.
        """
        self._running()
        if self._asleep:
            raise EngineError("the engine is asleep; await engine.wake() before an update")
        self._gate.clear()
        try:
            await self._drain()
        except BaseException:
            self._gate.set()
            raise
        self._unservable = "an update of its weights did not end; send a complete one"
        if self._handover is not None:
            self._handover.begin()

    async def load_bucket(self, index: int) -> None:
        """Hand a bucket to the server."""
        assert self._receiver is not None and self._handover is not None, "connect comes first"
        try:
            flat = await asyncio.to_thread(self._receiver.receive, index)
            await self._handover.load(index, flat)
        except BaseException as error:
            self._give_up(error)
            raise

    async def finish_update(self, version: int) -> ServedWeights:
        """Look at what the server has, and serve it.

        Returns:
            the checksums of what was handed to the server: SGLang does not compute ours. Of
            ``verify_tensors`` tensors the first rows are read back, and its own fingerprint of each
            tensor must have changed exactly if what it was sent for it did.

        Raises:
            EngineError: the server refused, is gone (EngineLost), or has not what it was sent.
        """
        assert self._handover is not None, "connect comes first"
        try:
            await self._handover.finish(version)
        except BaseException as error:
            self._give_up(error)
            raise
        self._unservable, self.policy_version = None, version
        self._weight_version = str(version)
        self._gate.set()
        return ServedWeights(version=version, sums=dict(self._handover.sums))

    async def give_up_update(self, reason: str) -> None:
        """Tell who waits for the end of an update that none comes; nothing where none is on."""
        if not self._gate.is_set():
            self._give_up(EngineError(reason))

    def _give_up(self, error: BaseException) -> None:
        self._unservable = f"an update of its weights failed: {error}"
        self._gate.set()  # who waits there is told so

    async def update_weights(
        self, params: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> ServedWeights:
        """Replace the weights; see :meth:`finish_update` for how they are checked.

        Raises:
            EngineError: a tensor is missing, unknown, of another shape or not finite; the server
                refused one, or has not what it was sent.
            EngineLost: it is gone.
        """
        self._running()
        plan = BucketPlan.of(self._specs, bucket_bytes=self.config.bucket_mb << 20)
        handover = self._plan_for(plan)
        await self.begin_update()
        try:
            for index, tensors in enumerate(plan.fill(params)):
                flat = packed(plan.buckets[index], tensors, self.config.device)
                await handover.load(index, flat)
        except BaseException as error:
            self._give_up(error)
            raise
        return await self.finish_update(version)

    async def _drain(self) -> None:
        """Wait until every answer is here and the server has nothing left."""
        limit_s = self.config.drain_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._no_turns.wait()
                await flush_until_nothing_runs(self._client, timeout_s=limit_s)
        except (TimeoutError, NoAnswer):
            raise EngineError(
                f"{len(self._turns)} requests, and what the SGLang server has of others, are "
                f"unfinished after {limit_s:g} s; abort them, or raise drain_timeout_s"
            ) from None
        except Unreachable as error:
            raise EngineLost(str(error)) from error

    # ------------------------------------------------------------------ sleep

    async def sleep(self, level: int = 1) -> None:
        """Free the cache, and at level 2 the weights; the server needs ``--enable-memory-saver``.

        Raises:
            EngineError: a request is unfinished, or the server refused.
        """
        self._running()
        if self._turns:
            raise EngineError(
                f"sleep: {len(self._turns)} requests are unfinished; await or abort them first"
            )
        if self._asleep:
            return
        await self._drain()
        tags = ["kv_cache"] if level == 1 else ["kv_cache", "weights"]
        await self._post("/release_memory_occupation", {"tags": tags})
        self._asleep, self._tags = True, tags
        if level > 1:
            self._unservable = "it forgot its weights in sleep level 2; update them first"

    async def wake(self) -> None:
        """Take the memory again. After level 2 weights must come before the next request."""
        self._running()
        if self._asleep:
            await self._post("/resume_memory_occupation", {"tags": self._tags})
            self._asleep = False
