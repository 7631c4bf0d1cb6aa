"""Tool-call parsers: from what the model wrote to calls."""

from __future__ import annotations

from agentrl.errors import RegistryError
from agentrl.registry import Registry
from agentrl.tool.parsers.base import ParsedTurn, ToolCallParser, TurnContext

NO_CALLS = "none"
FORMATS: dict[str, str] = {
    name: f"agentrl.tool.parsers.{name}:{class_name}"
    for name, class_name in {
        "deepseek": "DeepSeekParser",
        "glm": "GlmParser",
        "harmony": "HarmonyParser",
        "hermes": "HermesParser",
        "kimi_k2": "KimiK2Parser",
        "llama3_json": "Llama3JsonParser",
        "minimax": "MinimaxParser",
        "mistral": "MistralParser",
        "qwen3_coder": "Qwen3CoderParser",
    }.items()
}
"""Names of the formats that agentrl itself reads, and where their parsers are."""

parser_registry: Registry[type[ToolCallParser]] = Registry(
    "tool-call parser",
    "agentrl.parsers",
    {**FORMATS, NO_CALLS: "agentrl.tool.parsers.none:NoCallsParser"},
)


def make_parser(name: str) -> ToolCallParser:
    """Return the parser registered as ``name``.

    Raises:
        RegistryError: there is none, close matches being listed; or it lacks what a parser needs.
    """
    parser = parser_registry.get(name)()
    if not isinstance(getattr(parser, "stop_tokens", None), tuple):
        raise RegistryError(
            f"tool-call parser {name!r} has no tuple stop_tokens; name the control tokens that end "
            "a turn of its format beside the one that the chat template writes, or ()"
        )
    return parser


__all__ = [
    "FORMATS",
    "NO_CALLS",
    "ParsedTurn",
    "ToolCallParser",
    "TurnContext",
    "make_parser",
    "parser_registry",
]
