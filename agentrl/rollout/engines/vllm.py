"""Rollout on vLLM: one replica, in a process of its own.

**Where the work runs.** vLLM's core, the model and the loop that collects tokens share one process
(:mod:`.vllm_core`); this one sends a prompt and gets a whole turn back. So the event loop that
plays the episodes does nothing per token, and imports neither vLLM nor CUDA.

**Weights.** The engine starts from a configuration with random weights and refuses to sample until
it was given some, so that they come the same way at the start as after every step: in buckets,
copied into vLLM's parameters where they lie (:mod:`.vllm_worker`), and summed there afterwards. A
pool of replicas drives that as a :class:`~agentrl.weights.push.WeightSink`;
:meth:`VLLMEngine.update_weights` does it for one.

**Sampling.** Log-probabilities are those of the distribution that was sampled from: after
temperature, and where ``top_p`` or ``top_k`` cut it, of what was left (training refuses to cut). A
turn ends at its ``stop_token_ids`` and nowhere else. The same request gives the same tokens where
logits are the same bits; on a GPU vLLM promises that in ``deterministic`` mode, whatever else is in
the batch.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import EngineError, EngineLost
from agentrl.rollout.engines.config import VLLMEngineConfig
from agentrl.rollout.engines.setting_checks import check_settings
from agentrl.rollout.engines.vllm_installed import find_vllm
from agentrl.rollout.engines.vllm_process import EngineProcess
from agentrl.rollout.engines.vllm_requests import Requests, check_turn
from agentrl.rollout.engines.vllm_setup import (
    ModelPlan,
    child_environment,
    make_directory,
    make_setup,
    turn_to_start,
)
from agentrl.rollout.engines.vllm_wire import Ready
from agentrl.types import GenerateRequest, Generation
from agentrl.weights.channels import Address, Sender, open_sender
from agentrl.weights.checksum import wrapped_sum
from agentrl.weights.plan import BucketPlan
from agentrl.weights.push import StreamSource, push
from agentrl.weights.served import ServedWeights, WeightSpec

NO_WEIGHTS = -1
"""``policy_version`` of an engine that was given no weights."""


class VLLMEngine:
    """A :class:`~agentrl.rollout.engine.RolloutEngine` over one vLLM replica.

    Args:
        model: a causal language model of ``transformers`` or its configuration. Only architecture,
            names and shapes are read; weights come by :meth:`update_weights`.
        config: settings.

    Raises:
        ConfigError: vLLM is missing, its version outside the range, or a setting cannot work.
    """

    def __init__(self, model: Any, config: VLLMEngineConfig | None = None) -> None:
        self.config = config or VLLMEngineConfig()
        check_settings(self.config)
        self._installed = find_vllm()
        self._plan = ModelPlan(model)
        self.policy_version = NO_WEIGHTS
        self._process: EngineProcess | None = None
        self._ready: Ready | None = None
        self._lost: EngineLost | None = None
        self._requests = Requests()
        self._asleep = self._closed = False
        self._unservable: str | None = "it was given no weights: await engine.update_weights()"
        """Why nothing can be sampled."""
        self._touched = False
        """Whether an update has reached the parameters."""
        self._num_adapters = 0
        self._directory: Path | None = None
        self._sender: Sender | None = None
        """Of :meth:`update_weights`."""

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the process and check that every weight has its place.

        Raises:
            EngineError: it did not start within ``start_timeout_s``, or its parameters are not
                those of the model.
        """
        if self._process is not None or self._closed:
            raise EngineError("the engine was started before; build a new one")
        self._directory = make_directory()
        self._log_path = self._directory / "engine.log"
        log_path = Path(self.config.log_path or self._log_path)
        self._process = EngineProcess(
            on_message=self._requests.take, on_lost=self._lose, log_path=log_path
        )
        model_dir = self._directory / "model"
        try:
            async with turn_to_start(on_cpu=self._installed.is_cpu):
                self._ready = ready = await self._process.start(
                    make_setup(self.config, self._plan, model_dir),
                    env=child_environment(self.config, self._installed),
                    timeout_s=self.config.start_timeout_s,
                )
        finally:
            shutil.rmtree(model_dir, ignore_errors=True)
        if self.config.sleep and not ready.can_sleep:
            await self.close()
            raise EngineError(
                f"this build of vLLM ({self._installed.package} {self._installed.version}, on "
                f"{ready.device_type}) cannot sleep: it would say that it does and free nothing; "
                "set sleep=False"
            )

    @property
    def can_sleep(self) -> bool:
        """Whether :meth:`sleep` gives memory back; known once started."""
        return self._ready is not None and self._ready.can_sleep

    @property
    def num_unfinished(self) -> int:
        """Requests that have not returned."""
        return len(self._requests)

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._running().pid

    async def check_health(self) -> None:
        """Ask the engine loop for an answer.

        Raises:
            EngineLost: the process is gone, or did not answer within ``health_timeout_s``.
        """
        process = self._running()
        try:
            await process.call("ping", timeout_s=self.config.health_timeout_s)
        except EngineLost:
            raise
        except EngineError as error:
            raise EngineLost(f"the vLLM engine hangs: {error}") from None

    async def close(self) -> None:
        """Fail unfinished requests and stop the process. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._process is not None:
            await self._process.close()
        self._requests.fail(EngineError("the engine was closed while the request was unfinished"))
        self._drop_sender()
        failed = self._ready is None or self._lost is not None
        if self._directory is not None and not (failed and self._log_path.exists()):
            shutil.rmtree(self._directory, ignore_errors=True)  # else the log in it stays

    def _running(self) -> EngineProcess:
        if self._lost is not None:
            raise EngineLost(str(self._lost))
        if self._closed:
            raise EngineError("the engine is closed; start a new one")
        if self._process is None or self._ready is None:
            raise EngineError("the engine is not started; await engine.start() first")
        return self._process

    def _lose(self, error: EngineLost) -> None:
        self._lost = error
        self._requests.fail(error)

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate one turn; see :class:`~agentrl.rollout.engine.RolloutEngine`.

        Raises:
            EngineError: the request cannot be served as it is, or the engine is closed, asleep, or
                was given no sound weights.
            EngineLost: the engine's process is gone.
        """
        self._running()
        prompt = check_turn(
            request, max_context=self.config.max_context, vocab_size=self._plan.vocab_size
        )
        await self._requests.pass_gate(self.config.drain_timeout_s + self.config.call_timeout_s)
        process = self._running()
        if self._asleep:
            raise EngineError("the engine is asleep; await engine.wake() before generating")
        if self._unservable is not None:
            raise EngineError(f"the engine has nothing to sample from: {self._unservable}")
        assert self._ready is not None
        return await self._requests.run(
            process,
            request,
            prompt,
            positional_noise=self._ready.positional_noise,
            version=self.policy_version,
        )

    async def end_session(self, session_id: str) -> None:
        """End a request of the session as aborted; its prefix leaves the cache by age."""
        if self._ready is not None and self._lost is None and not self._closed:
            self._requests.abort(self._running(), session_id)

    async def abort(self, session_id: str | None = None) -> int:
        """End a session's request, or all, with the tokens they have.

        A request returns when the core has forgotten it, not when it was told to.

        Returns:
            how many requests were told so.
        """
        return self._requests.abort(self._running(), session_id)

    async def _drain(self) -> None:
        """Wait until every request has returned and the core says that it has none.

        Raises:
            EngineError: not within ``drain_timeout_s``.
        """
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self._requests.wait_until_none()
                process = self._running()
                left = await process.call("drained", timeout_s=None, when_idle=True)
        except TimeoutError:
            raise EngineError(
                f"{len(self._requests)} requests are still unfinished after "
                f"{self.config.drain_timeout_s} s; abort them, or raise drain_timeout_s"
            ) from None
        assert left == 0, f"vLLM called itself idle with {left} requests"

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._running().call(method, *args, timeout_s=self.config.call_timeout_s)

    # ------------------------------------------------------------------ weights, as a sink

    @property
    def num_receivers(self) -> int:
        """Tensor-parallel ranks, each of which opens the channel."""
        return self.config.tensor_parallel

    def weight_specs(self) -> Sequence[WeightSpec]:
        """Return what is served: names of ``transformers``, whole shapes, tied tensors once."""
        self._running()
        assert self._ready is not None
        return [
            WeightSpec(name=name, shape=shape, dtype=dtype)
            for name, shape, dtype in self._ready.specs
        ]

    async def connect(self, plan: BucketPlan, address: Address) -> None:
        """Open the channel that buckets come through, in place of the one before.

        Args:
            plan: of :meth:`weight_specs`.
            address: of the sender.
        """
        self._drop_sender()
        await self._call("connect", plan, address)

    async def begin_update(self) -> None:
        """Hold new requests back and wait until the core has none.

        Until :meth:`finish_update` has succeeded nothing is sampled.

        Raises:
            EngineError: requests are unfinished after ``drain_timeout_s``.
        """
        self._running()
        if self._asleep:
            raise EngineError("the engine is asleep; await engine.wake() before an update")
        self._requests.hold()
        try:
            await self._drain()
        except BaseException:
            self._requests.release()
            raise
        self._touched = True
        self._unservable = "an update of its weights did not end; send a complete one"

    async def load_bucket(self, index: int) -> None:
        """Copy bucket ``index`` from the channel into vLLM's parameters."""
        try:
            await self._call("load_bucket", index)
        except BaseException:
            self._requests.release()  # who waits there is told why nothing can be sampled
            raise

    async def finish_update(self, version: int) -> ServedWeights:
        """Sum what is served where it lies, forget adapter and prefixes, and serve it.

        Raises:
            EngineError: weights that are not finite; nothing is sampled from them.
        """
        try:
            parts = await self._call("finish_update")
            self._unservable = None
            self.policy_version = version
        finally:
            self._requests.release()
        sums = {name: wrapped_sum(values) for name, values in parts.items()}
        return ServedWeights(version=version, sums=sums)

    async def give_up_update(self, reason: str) -> None:
        """Tell who waits for the end of an update that none comes; nothing where none is on."""
        if self._requests.held:
            self._unservable = f"an update of its weights was given up ({reason}); send another"
            self._requests.release()

    # ------------------------------------------------------------------ weights, for one engine

    async def update_weights(
        self, params: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> ServedWeights:
        """Replace the weights; see :class:`~agentrl.rollout.engine.RolloutEngine`.

        In place and bucket by bucket: where it fails half way, nothing is sampled until another
        update was complete.

        Raises:
            EngineError: a tensor is missing, unknown, of another shape, or not finite, or what is
                served afterwards is not what was sent.
        """
        self._running()
        stream = iter(params)
        first = list(itertools.islice(stream, 1))
        if self._sender is None:
            await self._open_sender(first[0][1].device if first else torch.device("cpu"))
        assert self._sender is not None
        self._touched = False
        try:
            (served,) = await push(
                StreamSource(itertools.chain(first, stream), self._sender),
                [self],
                plan=self._sender.plan,
                version=version,
                timeout_s=self.config.drain_timeout_s + self.config.call_timeout_s,
                timeout_key="rollout.engine.kwargs.call_timeout_s",
                names=["the vLLM engine"],
            )
        except EngineError as error:
            if self._touched:
                self._unservable = f"its last update failed ({error}); send a complete one"
            raise
        finally:
            self._requests.release()
        return served

    async def _open_sender(self, device: torch.device) -> None:
        """Open a channel of the engine's own: over the GPU where both see it, else the host."""
        assert self._ready is not None
        same_gpu = (
            self._ready.device_type == "cuda"
            and device.type == "cuda"
            and device.index in (None, 0)
            and self.config.devices is None
            and self.config.tensor_parallel == 1
        )
        plan = BucketPlan.of(self.weight_specs(), bucket_bytes=self.config.bucket_mb << 20)
        sender = open_sender(
            "cuda_ipc" if same_gpu else "shm",
            plan,
            device=device if same_gpu else "cpu",
            num_receivers=self.num_receivers,
        )
        try:
            await self.connect(plan, sender.address)
        except BaseException:
            sender.close()
            raise
        self._sender = sender

    def _drop_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    async def update_adapters(self, path: str, version: int) -> None:
        """Load an adapter and use it for every later request.

        Args:
            path: a folder as ``peft`` saves one, of at most ``lora_rank``.
            version: of the policy that it makes of the weights that are served.

        Raises:
            EngineError: adapters are off, or vLLM refused this one.
        """
        if not self.config.lora_rank:
            raise EngineError("adapters are off; set lora_rank to the largest rank that may come")
        self._running()
        self._requests.hold()
        try:
            await self._drain()
            self._num_adapters += 1
            await self._call("set_adapter", path, self._num_adapters)
            self.policy_version = version
        finally:
            self._requests.release()

    # ------------------------------------------------------------------ sleep

    async def sleep(self, level: int = 1) -> None:
        """Give GPU memory back: the KV cache, and the weights to host memory (1) or for good (2).

        Raises:
            EngineError: a request is unfinished, or the engine cannot sleep.
        """
        self._running()
        if not self.can_sleep:
            raise EngineError(
                "the engine cannot sleep: it was started without sleep=True, and the CPU build "
                "of vLLM never can"
            )
        if level not in (1, 2):
            raise EngineError(f"sleep level {level}: it is 1 or 2")
        if self._requests:
            raise EngineError(
                f"sleep: {len(self._requests)} requests are unfinished; await or abort them first"
            )
        if self._asleep:
            return
        self._asleep = True
        await self._drain()
        await self._call("sleep", level)
        if level == 2:
            self._unservable = "it forgot its weights in sleep level 2; update them first"

    async def wake(self) -> None:
        """Take the memory again. After level 2 weights must come before the next request."""
        self._running()
        if self._asleep:
            await self._call("wake", None)
            self._asleep = False
