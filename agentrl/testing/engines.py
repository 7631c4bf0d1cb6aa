"""Engines without a model: random tokens, or a script."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from agentrl.agent.renderer import Renderer
from agentrl.errors import EngineError
from agentrl.types import GenerateRequest, Generation, StopReason

Script = Sequence[str] | Callable[[str, int], str]
"""What the model says in turn 0, 1, …; or ``(prompt text, turn) -> text``."""


class FakeEngine:
    """Samples ids at random: a pure function of the request's seed.

    Args:
        vocab_size: ids are drawn from ``[0, vocab_size)``.
        mean_tokens: how long a turn is on average, before it stops by itself.
        exclude: ids that are never drawn, for example control tokens.
        delay_s: how long a turn takes.

    Attributes:
        policy_version: stamped on every token; set it as a weight sync would.
        requests: every request so far, in order of arrival.
        ended: session ids that were ended.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        mean_tokens: int = 8,
        exclude: Sequence[int] = (),
        delay_s: float = 0.0,
    ) -> None:
        self.policy_version = 0
        self.requests: list[GenerateRequest] = []
        self.ended: list[str] = []
        self._choices = [index for index in range(vocab_size) if index not in set(exclude)]
        self._mean_tokens = mean_tokens
        self._delay_s = delay_s

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn."""
        self.requests.append(request)
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        sampling = request.sampling
        source = random.Random(sampling.seed)
        stops = sampling.stop_token_ids
        ids: list[int] = []
        logprobs: list[float] = []
        reason = StopReason.LENGTH
        for index in range(sampling.first_index + sampling.max_tokens):
            stop = bool(stops) and source.random() < 1.0 / self._mean_tokens
            token = stops[0] if stop else source.choice(self._choices)
            logprob = -source.random()
            if index < sampling.first_index:  # was sampled before
                continue
            ids.append(token)
            logprobs.append(logprob)
            if token in stops:
                reason = StopReason.STOP
                break
        return self._generation(ids, logprobs, reason)

    async def end_session(self, session_id: str) -> None:
        """Note that a session is over."""
        self.ended.append(session_id)

    def _generation(self, ids: list[int], logprobs: list[float], reason: StopReason) -> Generation:
        return Generation(
            ids=ids,
            logprobs=logprobs,
            policy_version=[self.policy_version] * len(ids),
            stop_reason=reason,
        )


class ScriptedEngine:
    """Says what a script says, in ids; every session begins the script anew.

    A text longer than the request allows is cut there, with the stop reason ``LENGTH``. Markers
    such as ``<|im_end|>`` inside a text are spelled out, never control tokens.

    Args:
        renderer: encodes the texts.
        script: texts by turn, or a function of the prompt's text and the turn.

    Raises:
        EngineError: on a turn for which the script has no text.
    """

    def __init__(self, renderer: Renderer, script: Script) -> None:
        self.policy_version = 0
        self.requests: list[GenerateRequest] = []
        self.ended: list[str] = []
        self._renderer = renderer
        self._script = script
        self._num_turns: Counter[str] = Counter()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Say the next text of the session's script."""
        self.requests.append(request)
        turn = self._num_turns[request.session_id]
        self._num_turns[request.session_id] += 1
        text = self._text(request, turn)
        ids = self._renderer.codec.encode_assistant(text)
        ids.append(self._renderer.stop_token_ids[0])
        limit = request.sampling.max_tokens
        reason = StopReason.STOP if len(ids) <= limit else StopReason.LENGTH
        ids = ids[:limit]
        return Generation(
            ids=ids,
            logprobs=[-0.5] * len(ids),
            policy_version=[self.policy_version] * len(ids),
            stop_reason=reason,
        )

    async def end_session(self, session_id: str) -> None:
        """Note that a session is over."""
        self.ended.append(session_id)
        self._num_turns.pop(session_id, None)

    def _text(self, request: GenerateRequest, turn: int) -> str:
        if callable(self._script):
            return self._script(self._renderer.decode(request.prompt_ids), turn)
        if turn >= len(self._script):
            raise EngineError(
                f"the script has {len(self._script)} turns; turn {turn} was asked for"
            )
        return self._script[turn]


def call_text(name: str, **arguments: Any) -> str:
    """Return a Hermes tool call as a model writes it."""
    import json

    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"
