"""Text to token ids such that only the chat template can produce control tokens.

Content (from tools, environments, users) and scaffolding (from the template) are told apart. A
stretch of text between two control tokens is encoded in one go, so that ids are those of a plain
one-shot encoding. Where content spells a control token, alone or together with its neighbours, the
stretch is cut inside that spelling: the pieces decode to the same text and hold no control token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from agentrl.errors import RenderError

_PROBE = "Plain words, x = f(1)\n\tif ok:  'caf\u00e9' \u2192 42 <b>{\"k\": [1]}</b>\n\n end"


class TokenCodec:
    """Encodes and decodes with a fast tokenizer.

    Control tokens are the special tokens, and those added tokens that the chat template itself
    names (``<tool_call>``, ``<think>``); other added tokens, such as runs of blanks, are ordinary.

    Args:
        tokenizer: a fast tokenizer of transformers with a chat template.

    Raises:
        RenderError: the tokenizer has no fast backend, or does not give text back unchanged.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RenderError(
                f"{type(tokenizer).__name__} has no fast backend, which exact rendering needs; "
                "load it with AutoTokenizer.from_pretrained(path, use_fast=True), or convert it "
                "to a tokenizer.json"
            )
        self._backend = backend
        self._normalizer = backend.normalizer
        template = str(getattr(tokenizer, "chat_template", "") or "")
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(
            index for index, token in added.items() if token.special
        )
        self.control_tokens: dict[str, int] = {
            token.content: index
            for index, token in added.items()
            if token.special or (token.content.strip() and token.content in template)
        }
        self.control_ids: frozenset[int] = frozenset(self.control_tokens.values())
        self.control_text: dict[int, str] = {i: text for text, i in self.control_tokens.items()}
        self._any_control = _alternation(self.control_tokens)
        self._any_special = _alternation(
            text for text, index in self.control_tokens.items() if index in self.special_ids
        )
        self.longest_token: int = max(
            map(len, backend.get_vocab(with_added_tokens=True)), default=1
        )
        """Characters of the longest token: text longer than n of it has more than n tokens."""
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._check_round_trip()

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, control tokens spelled out."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def normalize(self, text: str) -> str:
        """Return ``text`` as the tokenizer gives it back: in its Unicode normal form, if any."""
        if self._normalizer is None or text.isascii():
            return text
        return self._normalizer.normalize_str(text)

    def split_controls(self, text: str) -> list[int | str]:
        """Split template text into control token ids and the text between them."""
        pieces: list[int | str] = []
        position = 0
        for match in self._any_control.finditer(text):
            if match.start() > position:
                pieces.append(text[position : match.start()])
            pieces.append(self.control_tokens[match.group()])
            position = match.end()
        if position < len(text):
            pieces.append(text[position:])
        return pieces

    def encode_plain(self, text: str) -> list[int]:
        """Encode text that must not become a control token, whatever it spells.

        Raises:
            RenderError: the tokenizer makes a control token even of single characters.
        """
        return self._encode(text, self._any_control, self.control_ids)

    def encode_assistant(self, text: str) -> list[int]:
        """Encode what an assistant says.

        Added tokens such as ``<tool_call>`` stay whole, special tokens are spelled out.
        """
        return self._encode(text, self._any_special, self.special_ids)

    def cut(self, text: str, max_tokens: int) -> tuple[str, int]:
        """Return the longest prefix of at most ``max_tokens`` tokens, and how many were cut.

        Tokens are those of :meth:`encode_plain`: the spelling of a control token has several. Very
        long text is cut by characters first, so that the time is bounded; the number of tokens cut
        is then an estimate.
        """
        window = clean_text(text[: 16 * max_tokens + 256])
        starts: list[int] = []  # of each token, in characters
        position = 0
        for piece in _cut_inside(window, self._any_control):
            encoding = self._backend.encode(piece, add_special_tokens=False)
            starts += [position + start for start, _ in encoding.offsets]
            position += len(piece)
        num_tokens = len(starts)
        if num_tokens <= max_tokens:
            if len(window) == len(text):
                return window, 0
            return window, max(1, (len(text) - len(window)) * num_tokens // len(window))
        end = starts[max_tokens]
        dropped = num_tokens - max_tokens
        return window[:end], dropped + (len(text) - len(window)) * num_tokens // len(window)

    def _encode(
        self, text: str, forbidden: re.Pattern[str], forbidden_ids: frozenset[int]
    ) -> list[int]:
        if not text:
            return []
        ids: list[int]
        if forbidden.search(text) is None:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        else:
            ids = self._encode_pieces(_cut_inside(text, forbidden))
        if forbidden_ids.isdisjoint(ids):
            return ids
        # A normaliser can turn look-alike characters into a control token: no context, no token.
        ids = self._encode_pieces(text)
        if not forbidden_ids.isdisjoint(ids):
            raise RenderError(
                "the tokenizer makes a control token of ordinary text; declare its control tokens "
                "with normalized=False"
            )
        return ids

    def _encode_pieces(self, pieces: Iterable[str]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            ids.extend(self._backend.encode(piece, add_special_tokens=False).ids)
        return ids

    def _check_round_trip(self) -> None:
        half = len(_PROBE) // 2
        ids = [*self.encode_plain(_PROBE[:half]), *self.encode_plain(_PROBE[half:])]
        got = self.decode(ids)
        if got != self.normalize(_PROBE):
            raise RenderError(
                "the tokenizer does not give text back unchanged, so that a record of token ids "
                f"would not say what the model read: {_PROBE!r} came back as {got!r}; use a "
                "byte-level tokenizer (no unknown token, no added prefix space)"
            )


def clean_text(text: str) -> str:
    """Replace lone surrogates, which no tokenizer can encode, by ``?``."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def _alternation(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _cut_inside(text: str, forbidden: re.Pattern[str]) -> list[str]:
    """Cut after the first character of every spelling, overlapping ones too."""
    cuts: list[int] = []
    match = forbidden.search(text)
    while match is not None:
        cuts.append(match.start() + 1)
        match = forbidden.search(text, match.start() + 1)
    bounds = [0, *cuts, len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False) if a < b]
