"""A stand-in for an SGLang server that speaks its JSON and computes with a model of transformers.

After SGLang 0.5.16, as its sources have it and as it was found to behave: names and types of
fields, what is refused and with which status and what ends the server, abort by beginnings of ids,
a cache that is flushed only when nothing runs and lacks the last token of a turn, stop tokens that
``ignore_eos`` ignores too, noise by seed and position, weights as pickled tensors. One sequence is
computed at a time, in full, token by token: it is for tiny models.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from agentrl.testing.json_server import Answer, JsonServer
from agentrl.testing.sglang_sampling import sample
from agentrl.testing.sglang_tensors import ServedTensors

_GENERATE_FIELDS = {
    "rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream",
}  # fmt: skip
_SAMPLING_FIELDS = {
    "max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos",
    "sampling_seed", "skip_special_tokens", "no_stop_trim",
}  # fmt: skip


@dataclass(slots=True, eq=False)
class _Sequence:
    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    cached: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    aborted: bool = False


class SGLangServer:
    """Serves ``model`` on 127.0.0.1.

    Args:
        model: a causal language model; weights are loaded into it.
        context_length: most tokens of a sequence.
        load_format: what the server says that its weights came from; ``dummy`` is random ones.
        step_s: least time of a token, so that a test finds requests unfinished.

    Attributes:
        http: the server itself, with ``url`` and ``requests``.
        tensors: its weights.
        model_path: what the server says that its model came from.
        ended: set once something has ended it, as an exception in the scheduler does.
    """

    def __init__(
        self,
        model: Any,
        *,
        context_length: int = 256,
        load_format: str = "auto",
        step_s: float = 0.0,
    ) -> None:
        self.model = model.eval()
        self.tensors = ServedTensors(self.model)
        self.ended = asyncio.Event()
        self.model_path = ""
        self.step_s = step_s
        self._context_length = context_length
        self._load_format = load_format
        self._weight_version = "default"
        self._running: dict[str, _Sequence] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._cache: list[list[int]] = []
        self._released: set[str] = set()
        self.http = JsonServer(
            {
                "GET /server_info": self._server_info,
                "GET /health": self._health,
                "POST /generate": self._generate,
                "POST /abort_request": self._abort_request,
                "POST /flush_cache": self._flush_cache,
                "POST /update_weights_from_tensor": self._update_weights,
                "POST /get_weights_by_name": self._get_weights,
                "POST /weights_checker": self._check_weights,
                "POST /release_memory_occupation": self._release,
                "POST /resume_memory_occupation": self._resume,
            }
        )

    @property
    def num_running(self) -> int:
        """Requests that it works at."""
        return len(self._running)

    async def start(self, port: int = 0) -> None:
        """Listen."""
        await self.http.start(port)

    async def close(self) -> None:
        """Go away with all that is running."""
        await self.http.close()

    # ------------------------------------------------------------------ generation

    async def _server_info(self, body: Any, query: Mapping[str, str]) -> Answer:
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return 200, {
            "version": "0.5.16",
            "dtype": dtype,
            "load_format": self._load_format,
            "model_path": self.model_path,
            "enable_deterministic_inference": True,
            "context_length": self._context_length,
        }

    async def _health(self, body: Any, query: Mapping[str, str]) -> Answer:
        return 200, ""

    async def _generate(self, body: Any, query: Mapping[str, str]) -> Answer:
        sampling = body.get("sampling_params", {}) if isinstance(body, dict) else {}
        problem = self._problem(body, sampling)
        if problem is not None:
            return 400, {"error": {"message": problem}}
        prompt = list(body["input_ids"])
        sequence = _Sequence(body["rid"], prompt, sampling, self._num_cached(prompt))
        self._running[sequence.rid] = sequence
        self._idle.clear()
        try:
            finish = None
            while finish is None:
                await asyncio.sleep(self.step_s)
                finish = self._step(sequence)
        finally:
            del self._running[sequence.rid]
            self._cache.append([*sequence.prompt, *sequence.ids[:-1]])  # the last was never fed
            if not self._running:
                self._idle.set()
        pairs = zip(sequence.logprobs, sequence.ids, strict=True)
        return 200, {
            "text": "",
            "output_ids": sequence.ids,
            "meta_info": {
                "id": sequence.rid,
                "finish_reason": finish,
                "prompt_tokens": len(prompt),
                "completion_tokens": len(sequence.ids),
                "cached_tokens": sequence.cached,
                "weight_version": self._weight_version,
                "output_token_logprobs": [[value, token, None] for value, token in pairs],
                "output_token_logprobs_length": len(sequence.ids),
            },
        }

    def _problem(self, body: Any, sampling: Any) -> str | None:
        if not isinstance(body, dict) or not isinstance(sampling, dict):
            return "a JSON object with sampling_params is expected"
        unknown = sorted((body.keys() - _GENERATE_FIELDS) | (sampling.keys() - _SAMPLING_FIELDS))
        if unknown:
            return f"unexpected fields {unknown}"
        ids, vocab = body.get("input_ids"), self.model.config.vocab_size
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            return "input_ids must be a list of int"
        if min(ids) < 0 or max(ids) >= vocab:
            return f"input_ids leave the vocabulary of {vocab}"
        if body["rid"] in self._running:
            return f"Duplicate request ID: {body['rid']}"
        if len(ids) + sampling["max_new_tokens"] > self._context_length:
            return f"Requested token count exceeds the model's maximum of {self._context_length}"
        if sampling["top_k"] == 0 or not 0 < sampling["top_p"] <= 1 or sampling["temperature"] < 0:
            return "top_k must be -1 (disable) or at least 1, top_p in (0, 1], temperature >= 0"
        if self._released:
            return "the memory of the server is released"
        return None

    def _num_cached(self, prompt: list[int]) -> int:
        def common(known: list[int]) -> int:
            pairs = enumerate(zip(known, prompt, strict=False))
            return next((i for i, (a, b) in pairs if a != b), min(len(known), len(prompt)))

        return min(max(map(common, self._cache), default=0), len(prompt) - 1)

    def _step(self, sequence: _Sequence) -> dict[str, Any] | None:
        """Sample a token; returns the finish reason, if that was the last."""
        if sequence.aborted:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        sampling = sequence.sampling
        context = [*sequence.prompt, *sequence.ids]
        with torch.no_grad():
            logits = self.model(torch.tensor([context])).logits[0, -1].double()
        batch = [other.sampling for other in self._running.values()]
        token, logprob = sample(logits, sampling, batch, len(context))
        sequence.ids.append(token)
        sequence.logprobs.append(logprob)
        if len(sequence.ids) >= sampling["max_new_tokens"]:  # before any stop token is looked at
            return {"type": "length", "length": sampling["max_new_tokens"]}
        ends = {*sampling["stop_token_ids"], self.model.config.eos_token_id}
        if not sampling["ignore_eos"] and token in ends:
            return {"type": "stop", "matched": token}
        return None

    async def _abort_request(self, body: Any, query: Mapping[str, str]) -> Answer:
        for sequence in self._running.values():
            if body.get("abort_all") or (body["rid"] and sequence.rid.startswith(body["rid"])):
                sequence.aborted = True
        return 200, ""

    async def _flush_cache(self, body: Any, query: Mapping[str, str]) -> Answer:
        try:
            async with asyncio.timeout(float(query.get("timeout", 0.0))):
                await self._idle.wait()
        except TimeoutError:
            return 400, "Flush cache failed.\n"
        self._cache.clear()
        return 200, "Cache flushed.\n"

    # ------------------------------------------------------------------ weights, memory

    async def _update_weights(self, body: Any, query: Mapping[str, str]) -> Answer:
        await self._idle.wait()
        if "weights" in self._released:
            return 400, {"success": False, "message": "the weights are released"}
        try:
            self.tensors.load(body["serialized_named_tensors"][0])
        except Exception:  # the real one catches nothing that loading raises, and ends
            return await self._end()
        if body.get("flush_cache", True):
            self._cache.clear()
        if body.get("weight_version") is not None:
            self._weight_version = body["weight_version"]
        return 200, {"success": True, "message": "Success"}

    async def _get_weights(self, body: Any, query: Mapping[str, str]) -> Answer:
        rows = self.tensors.rows(body["name"], body["truncate_size"])
        if rows is None:
            return 400, {"error": {"message": "Get parameter by name failed"}}
        return 200, rows

    async def _check_weights(self, body: Any, query: Mapping[str, str]) -> Answer:
        ranks = [{"checksums": self.tensors.checksums(), "parallelism_info": {"rank": 0}}]
        return 200, {"success": True, "message": "Success.", "ranks": ranks}

    async def _release(self, body: Any, query: Mapping[str, str]) -> Answer:
        if self._running:  # an assertion there
            return await self._end()
        self._released |= set(body["tags"])
        return 200, None

    async def _resume(self, body: Any, query: Mapping[str, str]) -> Answer:
        self._released -= set(body["tags"])
        return 200, None

    async def _end(self) -> Answer:
        """End, as an exception that nobody expected ends the server; the answer reaches nobody."""
        if sys.exception() is not None:
            traceback.print_exc()
        await self.http.close()
        self.ended.set()
        return 500, ""


def main() -> None:
    """Serve a random model until killed: ``python -m agentrl.testing.sglang_server``."""
    from agentrl.testing.random_models import build

    parser = argparse.ArgumentParser()
    parser.add_argument("--builder", default="tiny-qwen3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int, default=256)
    parser.add_argument("--load-format", default="auto")
    given = parser.parse_args()
    torch.set_num_threads(1)

    async def serve() -> None:
        server = SGLangServer(
            build(given.builder, given.seed),
            context_length=given.context_length,
            load_format=given.load_format,
        )
        await server.start(given.port)
        await server.ended.wait()
        sys.exit(1)

    asyncio.run(serve())


if __name__ == "__main__":
    main()
