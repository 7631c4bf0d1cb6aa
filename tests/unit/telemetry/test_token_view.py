from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.errors import DataError
from agentrl.telemetry.token_view import TokenDecoder, token_blocks, visible
from agentrl.telemetry.trajectory_io import StoredTrajectory
from agentrl.testing.run_data import make_advantages, make_trajectory, synthetic_tokenizer
from agentrl.types import TokenRole


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> TokenDecoder:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    synthetic_tokenizer().save(str(path))
    return TokenDecoder(path)


@pytest.mark.parametrize("text", ["plain text", "naïve – ✓ 漢字 🎉🎉", "a\n\tb  c", ""])
def test_token_texts_join_to_the_text(decoder: TokenDecoder, text: str) -> None:
    ids = synthetic_tokenizer().encode(text).ids
    texts = decoder.texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_broken_utf_8_is_shown_and_does_not_swallow_what_follows(decoder: TokenDecoder) -> None:
    encode = synthetic_tokenizer().encode
    broken = encode("🎉").ids[:2] + encode("ok").ids
    texts = decoder.texts(broken)
    assert len(texts) == len(broken)
    assert "".join(texts).endswith("ok") and "\ufffd" in "".join(texts)


def test_blocks_follow_the_speakers_and_hold_what_training_saw(decoder: TokenDecoder) -> None:
    good = make_trajectory(seed=1, num_turns=2, success=True, policy_version=7, group_id="g")
    bad = make_trajectory(seed=2, num_turns=2, success=False, group_id="g")
    advantages = make_advantages([good, bad])
    blocks = token_blocks(
        StoredTrajectory(trajectory=good, advantages=advantages[good.id]), decoder
    )
    assert [block.name for block in blocks] == ["system", "user", "assistant", "tool", "assistant"]
    assert [block.turn.index for block in blocks if block.turn] == [0, 1]
    cells = [cell for block in blocks for cell in block.tokens]
    assert [cell.id for cell in cells] == good.segments[0].ids.tolist()
    for position, cell in enumerate(cells):
        sampled = bool(good.segments[0].loss_mask[position])
        assert sampled == (cell.role is TokenRole.SAMPLED)
        assert (cell.logprob is not None) == sampled
        assert cell.version == (7 if sampled else None)
        expected = float(advantages[good.id][0][position]) if sampled else None
        assert cell.advantage == expected
    assert cells[0].special and cells[0].text == "<|im_start|>"


def test_adjacent_turns_are_blocks_of_their_own(decoder: TokenDecoder) -> None:
    item = make_trajectory(seed=1, num_turns=1)
    start, end = item.turns[0].start, item.turns[0].end
    middle = (start + end) // 2
    halves = [
        replace(item.turns[0], index=0, end=middle),
        replace(item.turns[0], index=1, start=middle),
    ]
    stored = StoredTrajectory(trajectory=replace(item, turns=halves), advantages=None)
    turns = [block.turn.index for block in token_blocks(stored, decoder) if block.turn]
    assert turns == [0, 1]


def test_no_segments_no_blocks(decoder: TokenDecoder) -> None:
    item = replace(make_trajectory(seed=1), segments=[])
    assert token_blocks(StoredTrajectory(trajectory=item, advantages=None), decoder) == []


def test_ids_outside_of_the_vocabulary_do_not_break_the_view(decoder: TokenDecoder) -> None:
    item = make_trajectory(seed=1, num_turns=1)
    item.segments[0].ids = np.full_like(item.segments[0].ids, 10**6)
    (system, *_) = token_blocks(StoredTrajectory(trajectory=item, advantages=None), decoder)
    assert all(cell.id == 10**6 for cell in system.tokens)


def test_invisible_characters_become_visible() -> None:
    assert visible("a\n\tb ✓") == "a\n\tb ✓"
    assert (
        visible("\x1b[31m\x00\u202e\ud800\u200b") == "\\u{1b}[31m\\u{0}\\u{202e}\\u{d800}\\u{200b}"
    )


def test_a_missing_or_foreign_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer at"):
        TokenDecoder(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        TokenDecoder(tmp_path / "tokenizer.json")
