"""Sampling: the right distribution, and nothing but the request decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout.sampling import SamplingBatch, sample, uniforms


def batch(
    size: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seeds: np.ndarray | None = None,
    index: int = 0,
) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.full(size, temperature, np.float32),
        top_p=np.full(size, top_p, np.float32),
        top_k=np.full(size, top_k, np.int64),
        seed=np.arange(size, dtype=np.uint64) if seeds is None else seeds,
        index=np.full(size, index, np.uint64),
    )


def frequencies(logits: torch.Tensor, size: int = 40_000, **how: Any) -> torch.Tensor:
    ids, _ = sample(logits.expand(size, -1), batch(size, **how))
    return torch.bincount(ids, minlength=logits.shape[-1]) / size


def test_uniforms_are_uniform_and_uncorrelated_over_seeds_and_indices() -> None:
    seeds, indices = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    draws = uniforms(seeds.ravel(), indices.ravel()).reshape(300, 300)
    assert draws.min() >= 0.0 and draws.max() < 1.0
    counts, _ = np.histogram(draws, bins=100, range=(0, 1))
    # Chi-squared with 99 degrees of freedom: 200 is beyond 7 standard deviations.
    assert ((counts - 900.0) ** 2 / 900.0).sum() < 200
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_samples_follow_the_tempered_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -30.0])
    expected = torch.softmax(logits / temperature, dim=-1)
    assert torch.allclose(frequencies(logits, temperature=temperature), expected, atol=0.01)


def test_log_probability_is_that_of_the_distribution_that_was_drawn_from() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    probs = torch.softmax(logits / 0.7, dim=-1)
    ordered = probs.sort(dim=-1, descending=True).values
    third = ordered[:, 2:3]
    before = ordered.cumsum(-1) - ordered
    last = torch.where(before < 0.5, ordered, 1.0).amin(-1, keepdim=True)
    kept = {"all": probs >= 0, "top_k": probs >= third, "top_p": probs >= last}
    cuts: dict[str, dict[str, Any]] = {"all": {}, "top_p": {"top_p": 0.5}, "top_k": {"top_k": 3}}
    for name, how in cuts.items():
        ids, logprobs = sample(logits, batch(64, temperature=0.7, **how))
        cut = probs * kept[name]
        expected = (cut / cut.sum(-1, keepdim=True)).gather(1, ids[:, None])[:, 0].log()
        assert torch.allclose(logprobs, expected, atol=1e-6), name


def test_greedy_takes_the_maximum_and_reports_temperature_one() -> None:
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(0))
    ids, logprobs = sample(logits, batch(16, temperature=0.0))
    assert torch.equal(ids, logits.argmax(-1))
    assert torch.allclose(logprobs, torch.log_softmax(logits, -1).amax(-1), atol=1e-6)


def test_top_k_keeps_the_k_most_likely_in_their_proportions() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    seen = frequencies(logits, top_k=2)
    assert seen[0] == 0 and seen[2] == 0
    assert torch.allclose(seen[[1, 3]], torch.softmax(logits[[1, 3]], -1), atol=0.01)


def test_top_p_keeps_the_shortest_prefix_that_reaches_the_mass() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert (frequencies(logits, top_p=0.79) > 0).tolist() == [True, True, False, False]
    assert (frequencies(logits, top_p=0.81) > 0).tolist() == [True, True, True, False]
    assert (frequencies(logits, top_p=0.01) > 0).tolist() == [True, False, False, False]


def test_top_k_comes_before_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the top two, 4/7 is the first token's: 0.5 is reached by it alone.
    assert (frequencies(logits, top_k=2, top_p=0.5) > 0).tolist() == [True, False, False, False]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), index=st.integers(0, 5000), size=st.integers(1, 40))
def test_a_row_does_not_depend_on_its_neighbours(seed: int, index: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(size, 97)).astype(np.float32))
    how = SamplingBatch(
        temperature=rng.choice(np.array([0.0, 0.7, 1.0], np.float32), size),
        top_p=rng.choice(np.array([0.4, 1.0], np.float32), size),
        top_k=rng.choice(np.array([0, 5]), size),
        seed=rng.integers(0, 2**63, size, dtype=np.uint64),
        index=np.full(size, index, np.uint64),
    )
    ids, logprobs = sample(logits, how)
    row = int(rng.integers(size))
    alone = SamplingBatch(
        **{name: getattr(how, name)[row : row + 1] for name in SamplingBatch.__dataclass_fields__}
    )
    one_id, one_logprob = sample(logits[row : row + 1].clone(), alone)
    assert one_id.item() == ids[row].item()
    assert one_logprob.item() == logprobs[row].item()


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((20_000, 8), float("-inf"))
    logits[:, 3] = 0.0
    ids, logprobs = sample(logits, batch(20_000))
    assert (ids == 3).all() and (logprobs == 0).all()


def test_logits_that_are_not_finite_show_in_the_log_probability() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("nan")
    _, logprobs = sample(logits, batch(3))
    assert torch.isfinite(logprobs).tolist() == [True, False, True]
