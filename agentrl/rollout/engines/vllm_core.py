"""The process in which vLLM runs: ``python -m agentrl.rollout.engines.vllm_core FD``.

Scheduler, model and the loop that collects tokens share one process: vLLM's ``EngineCore`` is
stepped directly. Its usual home serialises every token of every request for a front end, which
costs more than all that is done per token here (``benchmarks/vllm_engine.py``), and nobody needs a
token before its turn ends. A thread takes messages in and prepares requests (which hashes prompts)
while the main thread waits for the GPU; another one sends what ended.

The process leads a group of its own. Where the parent is gone, whatever way it went, it takes the
whole group with it: ranks of a tensor-parallel model are in it too.
"""

# pyright: reportMissingImports=false
# vLLM need not be installed where types are checked.
from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.extras import misfit
from agentrl.rollout.engines.vllm_turns import TurnTable
from agentrl.rollout.engines.vllm_wire import (
    Abort,
    Add,
    Answer,
    Call,
    Failed,
    Link,
    Quit,
    Ready,
    Refused,
    Setup,
)

_FIELDS_WITHOUT_USE = ("mm_features", "pooling_params", "data_parallel_rank")
"""Of vLLM's ``EngineCoreRequest``, without a default."""


def main(fd: int) -> None:
    """Serve until told to quit or the parent is gone."""
    link = Link(socket.socket(fileno=fd))
    setup = link.receive()
    built: list[EngineLoop] = []
    threading.Thread(target=_watch, args=(link, built), daemon=True, name="inbox").start()
    try:
        loop = EngineLoop(setup, link)
        built.append(loop)
        link.send(loop.ready())
    except BaseException as error:
        traceback.print_exc()
        link.send(Failed(message=_explained(error)))
        _end_group()
        raise
    try:
        loop.run()
    except BaseException as error:
        traceback.print_exc()
        loop.outbox.put(Failed(message=_explained(error)))
        loop.outbox.put(None)
        loop.sender.join(timeout=10.0)
        _end_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # vLLM has shut down; taking the interpreter apart would take seconds


class EngineLoop:
    """Steps the core and answers the parent.

    Args:
        setup: what to serve.
        link: to the parent.
    """

    def __init__(self, setup: Setup, link: Link) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_cpu = current_platform.is_cpu()
        given = dict(setup.engine_args) | (dict(setup.cpu_args) if self._is_cpu else {})
        args = EngineArgs(model=setup.model_dir, **given)
        config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        self._config = config
        self._failed_worker = threading.Event()
        self._core = EngineCore(config, Executor.get_class(config), False, self._failed_worker.set)
        self._turns = TurnTable()
        self._idle_calls: list[Call] = []
        self._adapter: Any = None
        self._num_updates = 0
        """Of what makes cached keys and values wrong."""
        self._specs = self._workers("agentrl_map", dict(setup.expected))[0]
        self._make_request = _request_maker()
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sender = threading.Thread(
            target=_send_all, args=(self.outbox, link), daemon=True, name="outbox"
        )
        self.sender.start()

    def ready(self) -> Ready:
        """Return what the parent has to know."""
        cache = self._config.cache_config
        blocks = cache.num_gpu_blocks or 0
        return Ready(
            pid=os.getpid(),
            device_type="cpu" if self._is_cpu else "cuda",
            specs=self._specs,
            can_sleep=bool(self._config.model_config.enable_sleep_mode),
            positional_noise=bool(getattr(self._config, "use_v2_model_runner", False)),
            num_cache_tokens=blocks * (cache.block_size or 0),
            shared_files=_shared_files(),
        )

    # ------------------------------------------------------------------ messages

    def receive(self, message: Any) -> None:
        """Take a message in; on the inbox thread."""
        if isinstance(message, Add):
            try:
                prepared, _ = self._core.preprocess_add_request(
                    self._make_request(message, self._adapter, str(self._num_updates))
                )
            except Exception as error:
                self.outbox.put(Refused(message.key, f"{type(error).__name__}: {error}"))
                return
            self._inbox.put((message.key, prepared))
        else:
            self._inbox.put(message)

    def _handle(self, message: Any) -> bool:
        """Act on a message; returns False where it says to quit."""
        if isinstance(message, tuple):
            key, prepared = message
            name = self._turns.begin(key)
            try:
                self._core.add_request(prepared)
            except Exception as error:
                self._turns.drop(name)
                self.outbox.put(Refused(key, f"{type(error).__name__}: {error}"))
        elif isinstance(message, Abort):
            self._abort(self._turns.names(message.keys))
        elif isinstance(message, Call):
            if message.when_idle:
                self._idle_calls.append(message)
            else:
                self._answer(message)
        return not isinstance(message, Quit)

    def _abort(self, names: list[str]) -> None:
        """The scheduler forgets the requests before this returns: what is sent then is certain."""
        if names:
            self._core.abort_requests(names)
            for turn in self._turns.abort(names):
                self.outbox.put(turn)

    def _answer(self, call: Call) -> None:
        try:
            method: Callable[..., Any] = getattr(self, f"call_{call.method}")
            self.outbox.put(Answer(call.number, value=method(*call.args)))
        except Exception as error:
            traceback.print_exc()
            self.outbox.put(Answer(call.number, error=_explained(error)))

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Step while there is work; returns when told to quit."""
        while True:
            busy = self._busy()
            if not busy:
                while self._idle_calls:
                    self._answer(self._idle_calls.pop(0))
            try:
                message = self._inbox.get(block=not busy, timeout=1.0)
                while True:
                    if not self._handle(message):
                        self._core.shutdown()
                        return
                    message = self._inbox.get_nowait()
            except queue.Empty:
                pass
            if self._failed_worker.is_set():
                raise RuntimeError("a tensor-parallel rank ended")
            if self._busy():
                self._step()

    def _busy(self) -> bool:
        """Whether the core holds a request, or a batch is under way."""
        return self._core.scheduler.has_requests() or bool(self._core.batch_queue)

    def _step(self) -> None:
        outputs, executed = self._core.step_fn()
        if outputs:
            for batch in outputs.values():
                for turn in self._turns.take(batch.outputs):
                    self.outbox.put(turn)
        self._core.post_step(executed)
        if not executed and not self._core.batch_queue:
            time.sleep(0.0005)  # nothing could be scheduled: do not spin

    # ------------------------------------------------------------------ what the parent may call

    def _workers(self, method: str, *args: Any) -> list[Any]:
        return self._core.collective_rpc(method, args=args)

    def call_ping(self) -> None:
        """Answer: the loop is alive."""

    def call_drained(self) -> int:
        """Return the number of unfinished requests: called when idle, it is zero by the core."""
        return self._core.scheduler.get_num_unfinished_requests()

    def call_connect(self, plan: Any, address: Any) -> None:
        """Open the channel that weights will come through."""
        self._workers("agentrl_connect", plan, address)

    def call_load_bucket(self, index: int) -> None:
        """Copy one bucket into the parameters."""
        self._workers("agentrl_load_bucket", index)

    def call_finish_update(self) -> dict[str, list[int]]:
        """Forget adapter and prefixes; returns the checksums of every rank's slices by name."""
        if self._adapter is not None:
            self._core.remove_lora(self._adapter.lora_int_id)
            self._adapter = None
        self._forget_prefixes()
        sums: dict[str, list[int]] = {}
        for of_rank in self._workers("agentrl_sums"):
            for name, value in of_rank.items():
                sums.setdefault(name, []).append(value)
        return sums

    def call_set_adapter(self, path: str, number: int) -> None:
        """Load an adapter and let every later request use it."""
        from vllm.lora.request import LoRARequest

        before = self._adapter
        adapter = LoRARequest(f"version-{number}", number, path)
        if not self._core.add_lora(adapter):
            raise RuntimeError(f"vLLM did not load the adapter in {path!r}")
        if before is not None:
            self._core.remove_lora(before.lora_int_id)
        self._adapter = adapter
        self._forget_prefixes()

    def call_sleep(self, level: int) -> None:
        """Give memory back."""
        self._core.sleep(level)

    def call_wake(self, tags: list[str] | None) -> None:
        """Take it again; the cache holds whatever the memory does."""
        self._core.wake_up(tags)
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        """Let no later request find what was computed until now.

        Prompts get another salt. vLLM's own reset goes over every block of the cache, which takes
        tens of milliseconds on a GPU; what is there already leaves as any other block does.
        """
        self._num_updates += 1


def _request_maker() -> Callable[[Add, Any, str], Any]:
    """Return what turns a message into vLLM's request, by the fields this version has."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    known = EngineCoreRequest.__struct_fields__
    unused: dict[str, Any] = {name: None for name in _FIELDS_WITHOUT_USE if name in known}
    shared: dict[str, Any] = {
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 0,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "skip_clone": True,
    }

    def make(message: Add, adapter: Any, salt: str) -> Any:
        return EngineCoreRequest(
            request_id=str(message.key),
            prompt_token_ids=np.frombuffer(message.prompt, dtype=np.int32).tolist(),
            sampling_params=SamplingParams(**shared, **message.sampling),
            arrival_time=time.time(),
            lora_request=adapter,
            cache_salt=salt,
            **unused,
        )

    return make


def _send_all(outbox: queue.SimpleQueue[Any], link: Link) -> None:
    while (message := outbox.get()) is not None:
        try:
            link.send(message)
        except OSError:  # the parent is gone: the other thread ends the process
            return


def _watch(link: Link, built: list[EngineLoop]) -> None:
    """Take messages in until there will be no more, and then end the process.

    From the first on, so that a start ends with the parent too; none comes before it is told that
    the loop is ready.
    """
    try:
        while True:
            message = link.receive()
            built[0].receive(message)
    except (EOFError, OSError):
        _end_group()


def _end_group() -> None:
    """End this process and all it started, if it leads its group as it was started to."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _shared_files() -> list[str]:
    """Return the shared memory that this process and its ranks have mapped."""
    found: set[str] = set()
    for directory in Path("/proc").iterdir():
        try:
            if os.getpgid(int(directory.name)) == os.getpid():
                maps = (directory / "maps").read_text().splitlines()
                found |= {line.split(maxsplit=5)[-1] for line in maps if " /dev/shm/" in line}
        except (ValueError, OSError):  # no process, or one that has ended
            continue
    return sorted(found)


def _explained(error: BaseException) -> str:
    return misfit(error) or f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(int(sys.argv[1]))
