"""Turns with tool calls as models of each family write them: for tests and benchmarks of parsers.

::

    text = CALL_FORMS["glm47"].write([ToolCall(name="search", arguments={"query": "x"})])
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.types import ToolCall

# Strings that another reader could take for a value of another type.
_LITERALS = ("true", "null", "[1, 2]", "{}", "'q'", "42")
_LITERAL_RATE = 0.01
_WORDS = ("river", "Zürich", "北京", "a b", "x = f(1)\nprint(x)", "it's", 'say "hi"', "\\d+", "🙂")
_WORDS += ("<b>bold</b>", "a\tb", "C:\\temp", "100%", "3 < 4", "a;b", "```py", "[0]", "</div>")

TOOLS: tuple[Mapping[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool of tests.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in properties.items()},
            },
        },
    }
    for name, properties in {
        "search": {"query": "string", "limit": "integer", "exact": "boolean"},
        "run_code": {"code": "string", "env": "object", "argv": "array"},
        "set_price": {"item": "string", "price": "number", "tags": "array", "meta": "object"},
        "now": {},
    }.items()
)
"""Tools whose calls :func:`random_call` makes up, in OpenAI form."""


@dataclass(slots=True, frozen=True, kw_only=True)
class CallForm:
    """How one family writes calls."""

    parser: str
    """Name of the parser that reads it."""
    write: Callable[[Sequence[ToolCall]], str]
    """Returns the part of a turn that holds the calls, without the stop token."""
    controls: tuple[str, ...]
    """Pieces of the format, for tests that garble turns."""
    thought: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    """What opens and closes a thought before it."""
    single: bool = False
    """Whether a turn holds one call at most."""


def random_call(rng: random.Random) -> ToolCall:
    """Return a call of one of :data:`TOOLS` that fits its schema."""
    function = rng.choice(TOOLS)["function"]
    properties = function["parameters"]["properties"]
    chosen = [key for key in properties if rng.random() < 0.8]
    return ToolCall(
        name=function["name"],
        arguments={key: _value(rng, properties[key]["type"]) for key in chosen},
    )


def _value(rng: random.Random, kind: str, depth: int = 0) -> Any:
    if kind == "string" and rng.random() < _LITERAL_RATE:
        return rng.choice(_LITERALS)
    if kind == "string":
        return rng.choice(("", " ", "\n")).join(rng.choices(_WORDS, k=rng.randint(1, 4)))
    if kind == "integer":
        return rng.choice((0, 1, -7, 2**40, rng.randint(0, 999)))
    if kind == "number":
        return rng.choice((0.5, -2.25, 1e-07, 3, rng.random()))
    if kind == "boolean":
        return rng.random() < 0.5
    kinds = ["string", "integer", "number", "boolean"] + ["array", "object"] * (depth < 2)
    inner = [_value(rng, rng.choice(kinds), depth + 1) for _ in range(rng.randint(0, 3))]
    return inner if kind == "array" else {f"k{i}": value for i, value in enumerate(inner)}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls)


def _object(call: ToolCall, key: str = "arguments") -> str:
    return _json({"name": call.name, key: call.arguments})


def _qwen3_coder(calls: Sequence[ToolCall]) -> str:
    def parameters(call: ToolCall) -> str:
        pairs = call.arguments.items()
        return "".join(f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in pairs)

    return "\n".join(
        f"<tool_call>\n<function={c.name}>\n{parameters(c)}</function>\n</tool_call>" for c in calls
    )


def _llama3(calls: Sequence[ToolCall]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _mistral_list(calls: Sequence[ToolCall]) -> str:
    return f"[TOOL_CALLS] [{', '.join(map(_object, calls))}]"


def _mistral_args(calls: Sequence[ToolCall]) -> str:
    return "".join(f"[TOOL_CALLS]{c.name}[ARGS]{_json(c.arguments)}" for c in calls)


def _harmony(calls: Sequence[ToolCall]) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{c.name} <|constrain|>json<|message|>"
        f"{_json(c.arguments)}"
        for c in calls
    )


def _deepseek_v3(calls: Sequence[ToolCall]) -> str:
    return _deepseek(
        f"function<｜tool▁sep｜>{c.name}\n```json\n{_json(c.arguments)}\n```" for c in calls
    )


def _deepseek_v31(calls: Sequence[ToolCall]) -> str:
    return _deepseek(f"{c.name}<｜tool▁sep｜>{_json(c.arguments)}" for c in calls)


def _deepseek(bodies: Any) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>" for body in bodies)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _glm(calls: Sequence[ToolCall], line: str) -> str:
    def pairs(call: ToolCall) -> str:
        return "".join(
            f"<arg_key>{k}</arg_key>{line}<arg_value>{_plain(v)}</arg_value>{line}"
            for k, v in call.arguments.items()
        )

    return line.join(f"<tool_call>{c.name}{line}{pairs(c)}</tool_call>" for c in calls)


def _kimi_k2(calls: Sequence[ToolCall]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{c.name}:{i}<|tool_call_argument_begin|>"
        f"{_json(c.arguments)}<|tool_call_end|>"
        for i, c in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _minimax_m1(calls: Sequence[ToolCall]) -> str:
    return "\n".join(["<tool_calls>", *map(_object, calls), "</tool_calls>"])


def _minimax_m2(calls: Sequence[ToolCall]) -> str:
    def parameters(call: ToolCall) -> str:
        pairs = call.arguments.items()
        return "".join(f'<parameter name="{k}">{_plain(v)}</parameter>\n' for k, v in pairs)

    inner = "".join(f'<invoke name="{c.name}">\n{parameters(c)}</invoke>\n' for c in calls)
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


_XML = ("<tool_call>", "</tool_call>")
_JSON = ('{"name": "', '", "arguments": {', "}", '"', "{", "[", "]", ",", "\\")
_FUNCTION = ("<function=search>", "</function>", "<parameter=query>", "</parameter>", "\n")
_PAIRS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "search", "\n")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "```json\n",
    "```",
)
_DEEPSEEK += ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "function")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>")
_KIMI += ("<|tool_call_end|>", "<|tool_calls_section_end|>", "functions.search:0")
_HARMONY = (
    "<|start|>",
    "assistant",
    "<|channel|>",
    "commentary",
    "to=functions.search",
    "<|call|>",
)
_HARMONY += ("<|message|>", "<|constrain|>", "json", "final", "<|return|>")
_INVOKE = ("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="search">', "</invoke>")
_INVOKE += ('<parameter name="query">', "</parameter>", "\n")
_ARGS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_CHANNELS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")

CALL_FORMS: Mapping[str, CallForm] = {
    "hermes": CallForm(parser="hermes", write=_hermes, controls=_XML + _JSON),
    "qwen3_coder": CallForm(parser="qwen3_coder", write=_qwen3_coder, controls=_XML + _FUNCTION),
    "llama3_json": CallForm(
        parser="llama3_json", write=_llama3, controls=("<|python_tag|>", ";", *_JSON)
    ),
    "mistral_list": CallForm(
        parser="mistral",
        write=_mistral_list,
        controls=_ARGS + _JSON,
        thought=("[THINK]", "[/THINK]"),
    ),
    "mistral_args": CallForm(
        parser="mistral",
        write=_mistral_args,
        controls=_ARGS + _JSON,
        thought=("[THINK]", "[/THINK]"),
    ),
    "harmony": CallForm(
        parser="harmony",
        write=_harmony,
        controls=_HARMONY + _JSON,
        thought=_CHANNELS,
        single=True,
    ),
    "deepseek_v3": CallForm(parser="deepseek", write=_deepseek_v3, controls=_DEEPSEEK + _JSON),
    "deepseek_v31": CallForm(parser="deepseek", write=_deepseek_v31, controls=_DEEPSEEK + _JSON),
    "glm45": CallForm(parser="glm", write=lambda c: _glm(c, "\n"), controls=_XML + _PAIRS),
    "glm47": CallForm(parser="glm", write=lambda c: _glm(c, ""), controls=_XML + _PAIRS),
    "kimi_k2": CallForm(parser="kimi_k2", write=_kimi_k2, controls=_KIMI + _JSON),
    "minimax_m1": CallForm(
        parser="minimax", write=_minimax_m1, controls=("<tool_calls>", "</tool_calls>", *_JSON)
    ),
    "minimax_m2": CallForm(parser="minimax", write=_minimax_m2, controls=_INVOKE),
}
"""By name of the form; a parser may read several."""
