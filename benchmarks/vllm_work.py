"""Sessions, and plain vLLM playing them: shared by the arms of ``vllm_engine.py``.

As a program (``python benchmarks/vllm_work.py JOB.json``) it is one plain replica: it says
``@@ready``, plays a pass for every line that it reads, and answers each with a line of JSON.
"""

# pyright: reportMissingImports=false
# vLLM need not be installed where types are checked.
from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MARK = "@@"
"""Begins the lines that are ours, among vLLM's own."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Session:
    """What one session does: every turn samples ``num_sampled`` tokens; the last becomes a stop."""

    prompt: list[int]
    answers: list[list[int]]
    """What tools append after each turn but the last."""
    num_sampled: int
    stop_id: int
    seed: int


@dataclass(slots=True, kw_only=True)
class Played:
    """What an arm did in one pass."""

    num_sampled: int = 0
    seconds: float = 0.0
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    """By turn."""
    cached_tokens: dict[int, int] = field(default_factory=dict)
    ids: dict[str, list[int]] = field(default_factory=dict)
    """Session -> all its sampled tokens, to compare arms."""

    def add(self, session: str, turn: int, *, prompt: int, cached: int, ids: list[int]) -> None:
        """Count one turn."""
        self.num_sampled += len(ids)
        self.prompt_tokens[turn] = self.prompt_tokens.get(turn, 0) + prompt
        self.cached_tokens[turn] = self.cached_tokens.get(turn, 0) + cached
        self.ids.setdefault(session, []).extend(ids)

    def merge(self, other: dict[str, Any]) -> None:
        """Add what another replica did at the same time."""
        self.num_sampled += other["num_sampled"]
        for mine, theirs in (
            (self.prompt_tokens, other["prompt_tokens"]),
            (self.cached_tokens, other["cached_tokens"]),
        ):
            for turn, count in theirs.items():
                mine[int(turn)] = mine.get(int(turn), 0) + count
        self.ids |= other["ids"]


Turn = Callable[[str, int, list[int], Session], Awaitable[tuple[list[int], int]]]
"""(session, turn, prompt, what it does) -> sampled ids, cached prompt tokens."""


async def play(sessions: dict[str, Session], turn_of: Turn, played: Played) -> None:
    """Play all sessions at once, each turn after turn."""

    async def one(name: str, session: Session) -> None:
        record = list(session.prompt)
        for turn in range(len(session.answers) + 1):
            ids, cached = await turn_of(name, turn, record, session)
            played.add(name, turn, prompt=len(record), cached=cached, ids=ids)
            if turn < len(session.answers):
                record = [*record, *ids[:-1], session.stop_id, *session.answers[turn]]

    await asyncio.gather(*(one(name, session) for name, session in sessions.items()))


def sampling_of(session: Session, turn: int, temperature: float) -> Any:
    """Return vLLM's parameters: final only, nothing decoded, the sampled token's logprob flat."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=session.num_sampled,
        temperature=temperature,
        seed=session.seed + turn,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def play_offline(llm: Any, job: dict[str, Any], sessions: dict[str, Session]) -> Played:
    """``LLM.generate`` on all sessions, one call a turn: no session waits for a shorter one."""
    played = Played()
    records = {name: list(session.prompt) for name, session in sessions.items()}
    for turn in range(job["turns"]):
        outputs = llm.generate(
            [{"prompt_token_ids": records[name]} for name in sessions],
            [sampling_of(session, turn, job["temperature"]) for session in sessions.values()],
            use_tqdm=False,
        )
        for (name, session), output in zip(sessions.items(), outputs, strict=True):
            ids, prompt = list(output.outputs[0].token_ids), records[name]
            cached = output.num_cached_tokens or 0
            played.add(name, turn, prompt=len(prompt), cached=cached, ids=ids)
            if turn < len(session.answers):
                records[name] = [*prompt, *ids[:-1], session.stop_id, *session.answers[turn]]
    return played


async def play_online(engine: Any, job: dict[str, Any], sessions: dict[str, Session]) -> Played:
    """``AsyncLLM.generate``, a task for every session."""
    played = Played()

    async def turn_of(name: str, turn: int, prompt: list[int], session: Session) -> Any:
        last = None
        async for output in engine.generate(
            {"prompt_token_ids": prompt},
            sampling_of(session, turn, job["temperature"]),
            request_id=f"{name}-{turn}",
        ):
            last = output
        assert last is not None
        return list(last.outputs[0].token_ids), last.num_cached_tokens or 0

    await play(sessions, turn_of, played)
    return played


def replica(job: dict[str, Any]) -> None:
    """Serve passes until there is no further line."""
    sessions = {name: Session(**value) for name, value in job["sessions"].items()}

    def passes(run: Callable[[], Played], reset: Callable[[], Any]) -> None:
        gc.collect()
        gc.freeze()
        print(MARK + "ready", flush=True)
        for _ in sys.stdin:
            reset()
            begin = time.perf_counter()
            played = run()
            played.seconds = time.perf_counter() - begin
            print(MARK + json.dumps(asdict(played)), flush=True)

    if job["arm"] == "raw-llm":
        from vllm import LLM

        llm = LLM(**job["engine"])
        passes(lambda: play_offline(llm, job, sessions), llm.reset_prefix_cache)
        return
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    with asyncio.Runner() as runner:

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**job["engine"]))

        engine = runner.run(start())
        passes(
            lambda: runner.run(play_online(engine, job, sessions)),
            lambda: runner.run(engine.reset_prefix_cache()),
        )
        engine.shutdown()


if __name__ == "__main__":
    replica(json.loads(Path(sys.argv[1]).read_text()))
