"""A small byte-level tokenizer with a ChatML/Hermes template: trained in a second, no download."""

from __future__ import annotations

import functools
from typing import Any

CHATML_TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

_CORPUS = (
    "You may call tools. The answer is 42.\n",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2 * 3"}}\n</tool_call>',
    '{"type": "function", "function": {"name": "python", "description": "Run code.", '
    '"parameters": {"type": "object", "properties": {"code": {"type": "string"}}, '
    '"required": ["code"]}}}',
    "def f(x):\n    return x + 1\n",
    "higher\nlower\ncorrect\nguess a number between 1 and 9\n",
    "error: unknown tool; the tools are calculator, python\n",
    "system\nuser\nassistant\ntool\n",
)


def make_tokenizer(*, vocab_size: int = 512, chat_template: str = CHATML_TEMPLATE) -> Any:
    """Return a ``PreTrainedTokenizerFast`` that knows every byte and no unknown token.

    Merges cross words, as in the built-in tiny model. Control tokens: ``<|endoftext|>`` (padding),
    ``<|im_start|>``, ``<|im_end|>`` (end of turn), ids 0, 1, 2.

    Args:
        vocab_size: at least 260; the corpus is small, so fewer tokens may come out.
        chat_template: a Jinja template in place of the ChatML/Hermes one.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_train(vocab_size), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@functools.cache
def _trained_json(vocab_size: int) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in _CORPUS for _ in range(3)], trainer)
    return tokenizer.to_str()


def _train(vocab_size: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(_trained_json(vocab_size))
