"""Tokenizers for the renderer's tests."""

from __future__ import annotations

from typing import Any

import chat_templates as templates
from tokenizers import AddedToken

from agentrl.testing import make_tokenizer


def with_template(
    template: str, *, special: tuple[str, ...] = (), added: tuple[str, ...] = (), eos: str = ""
) -> Any:
    """The small byte-level tokenizer with another template and further control tokens."""
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    if eos:
        tokenizer.eos_token = eos
    return tokenizer


def qwen3_like() -> Any:
    return with_template(templates.QWEN3_LIKE, added=templates.QWEN3_ADDED)


def llama3_like() -> Any:
    return with_template(templates.LLAMA3_LIKE, special=templates.LLAMA3_ADDED, eos="<|eot|>")


def mistral_like() -> Any:
    return with_template(templates.MISTRAL_LIKE, special=templates.MISTRAL_ADDED, eos="</s>")
