"""How fast tool calls are parsed, beside SGLang's parsers (``llm-router-utils``).

Arms, on the same turns of one to three calls with a thought before them:

* ``ours``: the parser of the format.
* ``sglang``: its parser of the format, without the reasoning parser that it needs before it.
* ``json.loads``: the limit of formats that write JSON: the arguments alone, decoded.

Run: ``python benchmarks/parsers.py [--turns 2000] [--json]``
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from agentrl.testing.call_forms import CALL_FORMS, TOOLS, CallForm, random_call
from agentrl.tool.parsers import TurnContext, make_parser
from agentrl.types import ToolCall

SGLANG = "llm_router_utils.sglang.srt"
SGLANG_NAMES = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3_json": "llama3",
    "mistral_list": "mistral",
    "mistral_args": "mistral",
    "harmony": "gpt-oss",
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "glm45": "glm45",
    "glm47": "glm47",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax-m2",
}


def made_calls(form: CallForm, num_turns: int) -> list[list[ToolCall]]:
    rng = random.Random(0)
    sizes = [1 if form.single else rng.randint(1, 3) for _ in range(num_turns)]
    return [[random_call(rng) for _ in range(size)] for size in sizes]


def mb_per_s(parse: Callable[[str], object], texts: Sequence[str]) -> float:
    num_bytes = sum(len(text.encode()) for text in texts)
    best_s = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for text in texts:
            parse(text)
        best_s = min(best_s, time.perf_counter() - start)
    return num_bytes / best_s / 1e6


def sglang_parse(name: str) -> Callable[[str], object] | None:
    try:
        protocol = import_module(f"{SGLANG}.entrypoints.openai.protocol")
        parsing = import_module(f"{SGLANG}.function_call.function_call_parser")
    except ImportError:
        return None
    if name not in SGLANG_NAMES:
        return None
    tools = [protocol.Tool.model_validate(tool) for tool in TOOLS]
    return lambda text: parsing.FunctionCallParser(tools, SGLANG_NAMES[name]).parse_non_stream(text)


def measure(name: str, num_turns: int) -> dict[str, Any]:
    form = CALL_FORMS[name]
    turns = made_calls(form, num_turns)
    parser, context = make_parser(form.parser), TurnContext.of(TOOLS)
    theirs = sglang_parse(name)
    opened, closed = form.thought
    texts = [f"{opened}I shall look it up.{closed}{form.write(calls)}" for calls in turns]
    if name == "harmony":
        theirs_texts = [f"<|start|>assistant{text}<|call|>" for text in texts]
    elif name == "llama3_json":
        theirs_texts = [form.write(calls) for calls in turns]
    else:
        theirs_texts = texts
    arguments = [json.dumps([call.arguments for call in calls]) for calls in turns]
    return {
        "form": name,
        "ours": mb_per_s(lambda text: parser.parse(text, context), texts),
        "sglang": None if theirs is None else mb_per_s(theirs, theirs_texts),
        "json.loads": mb_per_s(json.loads, arguments),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--turns", type=int, default=2000)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    logging.disable(logging.CRITICAL)
    rows = [measure(name, chosen.turns) for name in CALL_FORMS]
    if chosen.json:
        print(json.dumps(rows))
        return
    print(f"{'MB/s':14}{'ours':>8}{'sglang':>8}{'json.loads':>12}")
    for row in rows:
        cells = [row[arm] for arm in ("ours", "sglang", "json.loads")]
        shown = [f"{cell:.1f}" if cell is not None else "-" for cell in cells]
        print(f"{row['form']:14}{shown[0]:>8}{shown[1]:>8}{shown[2]:>12}")


if __name__ == "__main__":
    main()
