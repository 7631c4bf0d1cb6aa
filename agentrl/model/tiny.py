"""The embedded default model: a Qwen3 of a third of a million parameters, and its tokenizer.

It learns tool use on a laptop's CPU. Nothing is downloaded: the tokenizer is trained on text of
the environment at hand and the weights start at random, to be warmed up by supervised training.
Both are plain ``transformers`` objects that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load.

The tokenizer is a byte-level BPE, so no text is unknown to it. It splits at digits and at line
breaks (also at those escaped inside JSON strings) but not at words: one token may hold a whole
line of code, which makes an episode some 75 tokens long, where splitting at words needs 190.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.errors import ModelError

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, START, END)
DEFAULT_VOCAB_SIZE = 640
MAX_CONTEXT_TOKENS = 1_024

_ALPHABET = pre_tokenizers.ByteLevel.alphabet()
_MIN_VOCAB_SIZE = len(_ALPHABET) + len(SPECIAL_TOKENS)

# A role header stands alone, so that the tokens of a conversation are those of its parts:
# nothing the model says can merge with the header before it.
_HEADER_OR_DIGIT = r"\A(?:system|user|assistant|tool)\n|[0-9]"
_ESCAPED_LINE_BREAK = r"\\n"

CHAT_TEMPLATE = """\
{%- macro signature(tool) -%}
{%- set function = tool.function if tool.function is defined else tool -%}
{{- function.name }}(
{%- set parameters = (function.parameters or {}).properties or {} -%}
{%- for name, schema in parameters.items() -%}
{{- name }}: {{ schema.type or "any" }}{% if not loop.last %}, {% endif -%}
{%- endfor -%}
)
{%- endmacro -%}
{%- set has_system = messages and messages[0].role == "system" -%}
{%- if has_system or tools -%}
{{- "<|im_start|>system\\n" }}
{%- if has_system %}{{ messages[0].content }}{% endif -%}
{%- if has_system and tools %}{{ "\\n" }}{% endif -%}
{%- if tools -%}
Tools:{% for tool in tools %} {{ signature(tool) }}{% endfor -%}
{%- endif -%}
{{- "<|im_end|>\\n" }}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and has_system) -%}
{{- "<|im_start|>" + message.role + "\\n" }}
{%- if message.role == "tool" -%}
{{- "<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- else -%}
{{- message.content or "" }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function is defined else call -%}
{%- if message.content or not loop.first %}{{ "\\n" }}{% endif -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson }}
{{- "}\\n</tool_call>" }}
{%- endfor -%}
{%- endif -%}
{{- "<|im_end|>\\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif -%}
"""
"""ChatML with Hermes tool calls; a tool is listed by its signature, to save tokens."""

_MAX_PIECE_CHARS = 16_384


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE
) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE on ``texts``, which are conversations in the template's format.

    The vocabulary may stay below ``vocab_size`` where the texts hold too few different pairs.

    Raises:
        ModelError: ``vocab_size`` has no room for the 256 bytes and the special tokens, or a
            single text was given instead of several.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ModelError(
            f"vocab_size must be at least {_MIN_VOCAB_SIZE} (all bytes and the special tokens), "
            f"got {vocab_size}"
        )
    if isinstance(texts, str):
        raise ModelError("texts must be several texts, got one string; pass [text]")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_HEADER_OR_DIGIT), "isolated"),
            pre_tokenizers.Split(Regex(_ESCAPED_LINE_BREAK), "merged_with_next"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=_ALPHABET,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Cut at special tokens: the trainer would otherwise learn merges across them.

    Long pieces are cut as well: the trainer's time grows with the square of their length.
    """
    specials = "|".join(re.escape(token) for token in SPECIAL_TOKENS)
    for text in texts:
        for piece in filter(None, re.split(specials, text)):
            for at in range(0, len(piece), _MAX_PIECE_CHARS):
                yield piece[at : at + _MAX_PIECE_CHARS]


def tiny_config(
    vocab_size: int,
    *,
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    head_dim: int = 32,
    feed_forward_size: int = 256,
) -> Qwen3Config:
    """Return the configuration of the default model: 0.38 M parameters at 640 tokens.

    Without ``num_kv_heads``, two heads share one key and value.
    """
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads or max(1, num_heads // 2),
        head_dim=head_dim,
        intermediate_size=feed_forward_size,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        # At this width the usual 0.02 makes the first hundreds of steps slow.
        initializer_range=0.05,
    )


def build_tiny(
    tokenizer: PreTrainedTokenizerFast, seed: int, config: Qwen3Config | None = None
) -> Qwen3ForCausalLM:
    """Return a fresh model for ``tokenizer``, in float32 on the CPU, in evaluation mode.

    The weights are a pure function of ``seed`` and the configuration; torch's global generator
    is left as it was.

    Raises:
        ModelError: ``config`` has fewer embeddings than the tokenizer has tokens.
    """
    config = config or tiny_config(len(tokenizer))
    if config.vocab_size < len(tokenizer):
        raise ModelError(
            f"the model has {config.vocab_size} embeddings for {len(tokenizer)} tokens; "
            "build the configuration with tiny_config(len(tokenizer))"
        )
    config.pad_token_id = int(tokenizer.convert_tokens_to_ids(PAD))  # pyright: ignore
    config.eos_token_id = int(tokenizer.convert_tokens_to_ids(END))  # pyright: ignore
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).float().eval()
