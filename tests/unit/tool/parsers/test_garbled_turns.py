"""Turns that no model should write: nothing raises, nothing hangs, no thought is executed."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator

import pytest

from agentrl.bench.count_lines import count_lines
from agentrl.testing.call_forms import CALL_FORMS, TOOLS, CallForm, random_call
from agentrl.tool.parsers import ToolCallParser, TurnContext, make_parser
from agentrl.types import ToolCall

NUM_TURNS = 100_000 if os.environ.get("AGENTRL_SOAK") else 5_000
"""Over all forms."""
CONTEXT = TurnContext.of(TOOLS)
HIDDEN = ToolCall(name="hidden", arguments={"query": "x"})
THOUGHTS = ("<think>", "</think>", "[THINK]", "[/THINK]", "analysis", "<|start|>", "<|end|>")


def garble(rng: random.Random, text: str, form: CallForm) -> str:
    """Apply a few edits of the kinds that a model's slips have."""
    for _ in range(rng.randint(1, 4)):
        a, b = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        control = rng.choice(form.controls)
        at = rng.choice([i for i in range(len(text)) if text.startswith(control, i)] or [a])
        text = rng.choice(
            [
                text[:b],  # truncated
                text[:b] + text[a:],  # said twice
                text[b:] + text[:b],  # swapped
                text[:at] + text[at + len(control) :],  # a piece left out
                text[:at] + control + text[at:],
                text[:a] + control + text[a:],
                text.replace('"', "'", rng.randint(1, 4)),
                text[:a] + rng.choice("\\\"'{}[]<>\n\x00\ud800é") + text[a:],
            ]
        )
    return text


def without_thoughts(text: str) -> str:
    for tag in THOUGHTS:
        text = text.replace(tag, "")
    return text


@pytest.mark.parametrize("name", CALL_FORMS)
def test_no_garbled_turn_raises_or_runs_what_was_only_thought(name: str):
    form, rng = CALL_FORMS[name], random.Random(name)
    parser = make_parser(form.parser)
    opened, closed = form.thought
    for _ in range(NUM_TURNS // len(CALL_FORMS)):
        calls = [random_call(rng) for _ in range(1 if form.single else rng.randint(1, 3))]
        said = garble(rng, form.write(calls), form)
        parsed = parser.parse(said, CONTEXT)
        assert isinstance(parsed.content, str)
        assert all(call.name or call.error for call in parsed.tool_calls)

        thought = without_thoughts(garble(rng, f"I {form.write([HIDDEN])} hm", form))
        before = without_thoughts(garble(rng, "So " + form.write(calls), form))
        text = rng.choice([f"{opened}{thought}{closed}{said}", f"{before}{opened}{thought}"])
        assert "hidden" not in executed(parser, text), text
        if name != "harmony":  # its prompts open no thought
            in_thought = TurnContext.of(TOOLS, in_thought=True)
            assert "hidden" not in executed(parser, f"{thought}{closed}{said}", in_thought)


def executed(parser: ToolCallParser, text: str, context: TurnContext = CONTEXT) -> set[str]:
    return {call.name for call in parser.parse(text, context).tool_calls if call.error is None}


SHORT = 500


def adversaries(form: CallForm) -> dict[str, Callable[[int], str]]:
    """Texts of growing size that are expensive for a careless parser."""
    call = form.write([ToolCall(name="search", arguments={"query": "x", "limit": 3})])
    marker = form.controls[0]
    cut = call[: call.index("x")]
    opened, closed = form.thought
    return {
        "calls": lambda n: call * n,
        "markers": lambda n: marker * n,
        "all markers": lambda n: "".join(form.controls) * n,
        "calls that break off": lambda n: cut * n,
        "broken calls": lambda n: call.replace("x", '"') * n,
        "braces": lambda n: call[: call.index("x")] + "{" * n * 50,
        "thoughts": lambda n: (opened + closed) * n,
        "thoughts in broken calls": lambda n: (cut + opened + closed) * n + call,
        "spaces": lambda n: marker + " " * n * 50 + call,
        "closed at the end": lambda n: marker * n + form.controls[1],
        "backslashes": lambda n: cut + "\\" * n * 50,
        "fences": lambda n: ("```\n" + cut) * n,
    }


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What other tests of this process left on the heap would be walked again and again."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CALL_FORMS)
def test_a_megabyte_takes_as_many_steps_a_byte_as_a_part_of_it(name: str):
    form = CALL_FORMS[name]
    parser = make_parser(form.parser)
    for kind, write in adversaries(form).items():
        num_repeats = max(1, SHORT // max(1, len(write(20)) // 20))
        short, long = write(num_repeats), write(8 * num_repeats)
        ratio = steps(parser, long) / steps(parser, short)
        assert ratio < 1.5 * len(long) / len(short) + 1, kind
        parser.parse(write(1_000_000 // max(1, len(write(20)) // 20)), CONTEXT)


def steps(parser: ToolCallParser, text: str) -> int:
    """Return how many lines of Python a parse runs."""
    with count_lines() as lines:
        parser.parse(text, CONTEXT)
    return lines.number
