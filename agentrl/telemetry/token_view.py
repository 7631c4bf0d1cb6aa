"""A trajectory as blocks of tokens that can be looked at: text, role, and what training saw."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from agentrl.errors import DataError
from agentrl.telemetry.trajectory_io import StoredTrajectory
from agentrl.types import Segment, TokenRole, Turn

_MAX_JOINED = 8
_BLOCK_NAMES = {
    TokenRole.SYSTEM: "system",
    TokenRole.USER: "user",
    TokenRole.TOOL: "tool",
    TokenRole.ASSISTANT: "assistant",
    TokenRole.SAMPLED: "assistant",
}


@dataclass(slots=True, frozen=True, kw_only=True)
class TokenCell:
    """One token."""

    text: str
    id: int
    role: TokenRole
    special: bool
    logprob: float | None
    """Of sampled tokens, like the fields below."""
    version: int | None
    advantage: float | None
    trainer_logprob: float | None = None
    """Before the update; None where the trainer was not asked."""


@dataclass(slots=True, kw_only=True)
class TokenBlock:
    """A run of tokens of one speaker."""

    name: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    turn: Turn | None
    """The turn that was sampled here."""
    tokens: list[TokenCell] = field(default_factory=list)


class TokenDecoder:
    """Texts of tokens from a ``tokenizer.json``, without transformers or torch.

    Raises:
        DataError: the file is missing or no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        if not path.is_file():
            raise DataError(f"no tokenizer at {str(path)!r}")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{path}: no tokenizer of this format ({error})") from error
        self.special_ids = {
            index
            for index, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token.

        Where a character spans several tokens, the first carries it and the others are "".
        """
        out: list[str] = []
        while len(out) < len(ids):
            start = len(out)
            text = self._decode(ids[start : start + 1])
            width = 1
            while "\ufffd" in text and width < min(_MAX_JOINED, len(ids) - start):
                joined = self._decode(ids[start : start + width + 1])
                width += 1
                if "\ufffd" not in joined:
                    out += [joined, *[""] * (width - 1)]
                    break
            else:
                out.append(text)
        return out

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def token_blocks(stored: StoredTrajectory, decoder: TokenDecoder) -> list[TokenBlock]:
    """Cut every segment of a trajectory into blocks; a sampled turn is a block with its header."""
    blocks: list[TokenBlock] = []
    for index, segment in enumerate(stored.trajectory.segments):
        turns = [turn for turn in stored.trajectory.turns if turn.segment == index]
        advantages = None if stored.advantages is None else stored.advantages[index]
        scored = None if stored.trainer_logprobs is None else stored.trainer_logprobs[index]
        blocks += _segment_blocks(segment, turns, advantages, scored, decoder)
    return blocks


def visible(text: str) -> str:
    """Make control, bidirectional and unpaired characters visible; keep line feeds and tabs."""
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co")
        else f"\\u{{{ord(character):x}}}"
        for character in text
    )


def _segment_blocks(
    segment: Segment,
    turns: Sequence[Turn],
    advantages: np.ndarray | None,
    scored: np.ndarray | None,
    decoder: TokenDecoder,
) -> list[TokenBlock]:
    ids = segment.ids.tolist()
    texts = decoder.texts(ids)
    turn_of = {position: turn for turn in turns for position in range(turn.start, turn.end)}
    blocks: list[TokenBlock] = []
    for position, token_id in enumerate(ids):
        role = TokenRole(int(segment.roles[position]))
        name, turn = _BLOCK_NAMES[role], turn_of.get(position)
        starts_turn = turn is not None and blocks and blocks[-1].turn not in (None, turn)
        if not blocks or blocks[-1].name != name or starts_turn:
            blocks.append(TokenBlock(name=name, turn=None))
        block = blocks[-1]
        block.turn = block.turn or turn
        sampled = bool(segment.loss_mask[position])
        block.tokens.append(
            TokenCell(
                text=visible(texts[position]),
                id=token_id,
                role=role,
                special=token_id in decoder.special_ids,
                logprob=float(segment.logprobs[position]) if sampled else None,
                version=int(segment.policy_version[position]) if sampled else None,
                advantage=float(advantages[position])
                if sampled and advantages is not None
                else None,
                trainer_logprob=float(scored[position])
                if sampled and scored is not None and not np.isnan(scored[position])
                else None,
            )
        )
    return blocks
