from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec.randomness import derive_keys, exponential_noise
from specdec.sampling import (
    draw_from_distribution,
    draw_tokens,
    probs_from_logits,
    truncate_to_support,
)
from specdec.types import DraftDistribution, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def shaped(logits: list[float] | torch.Tensor, **params: float) -> torch.Tensor:
    """One row through the pipeline, in float64 unless given as a tensor."""
    if not isinstance(logits, torch.Tensor):
        logits = torch.tensor(logits, dtype=torch.float64)
    return probs_from_logits(logits[None], [SamplingParams(**params)])[0]  # type: ignore[arg-type]


def by_transformers(logits: torch.Tensor, temperature: float, top_k: int, top_p: float):
    scores = TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return torch.softmax(scores, dim=-1)[0]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.integers(2, 300),
    spread=st.floats(0.1, 10.0),
    temperature=st.floats(0.05, 20.0),
    top_k=st.integers(0, 310),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
)
def test_as_transformers(
    seed: int, vocab_size: int, spread: float, temperature: float, top_k: int, top_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab_size, generator=generator, dtype=torch.float64) * spread
    expected = by_transformers(logits, temperature, top_k, top_p)
    # Not where a rounding of the cumulative mass decides what is kept.
    before = by_transformers(logits, temperature, top_k, 1.0).sort(descending=True).values
    assume((before.cumsum(0) - top_p).abs().min() > 1e-9 or top_p == 1.0)
    probs = shaped(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    torch.testing.assert_close(probs, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(probs > 0, expected > 0)


def test_large_vocabulary_whose_mass_is_spread() -> None:
    """More tokens are kept than are looked at first."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5000, generator=generator, dtype=torch.float64) * 0.3
    probs = shaped(logits, top_p=0.9)
    assert int((probs > 0).sum()) > 1024
    torch.testing.assert_close(probs, by_transformers(logits, 1.0, 0, 0.9))


# Ties.


def test_greedy_takes_the_lowest_id_of_the_largest() -> None:
    assert shaped([1.0, 3.0, 3.0, 2.0], temperature=0.0).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_top_k_keeps_ties_with_the_kth() -> None:
    probs = shaped([3.0, 2.0, 2.0, 2.0, 1.0], top_k=2)
    assert (probs > 0).tolist() == [True, True, True, True, False]
    assert probs[1] == probs[2] == probs[3]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.2, [0]), (0.26, [0, 1]), (0.5, [0, 1]), (0.51, [0, 1, 2]), (0.8, range(4))],
)
def test_top_p_ranks_ties_by_id(top_p: float, kept: list[int]) -> None:
    probs = shaped([0.0] * 4, top_p=top_p)
    assert probs.nonzero()[:, 0].tolist() == list(kept)
    torch.testing.assert_close(probs[probs > 0], torch.full((len(kept),), 1 / len(kept)).double())


def test_top_p_keeps_a_token_iff_the_mass_before_it_is_below() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
    assert (shaped(logits, top_p=0.5 - 1e-9) > 0).tolist() == [True, False, False, False]
    assert (shaped(logits, top_p=0.5 + 1e-9) > 0).tolist() == [True, True, False, False]


# Extremes.


def test_a_tiny_temperature_is_greedy_and_finite() -> None:
    probs = shaped(torch.tensor([1.0, 1.1, -5.0, 1e4, 9.9e3]), temperature=1e-8)
    assert probs.tolist() == [0.0, 0.0, 0.0, 1.0, 0.0]


def test_a_huge_temperature_is_flat() -> None:
    probs = shaped(torch.tensor([1.0, 3.0, -5.0, 7.0]), temperature=1e6)
    torch.testing.assert_close(probs, torch.full((4,), 0.25), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("top_k", "num_kept"), [(1, 1), (4, 4), (9, 4), (0, 4), (3, 3)])
def test_top_k_at_its_ends(top_k: int, num_kept: int) -> None:
    probs = shaped([1.0, 3.0, -5.0, 7.0], top_k=top_k)
    assert int((probs > 0).sum()) == num_kept


def test_top_p_at_its_ends() -> None:
    logits = [1.0, 3.0, -5.0, 7.0]
    assert shaped(logits, top_p=1e-9).tolist() == [0.0, 0.0, 0.0, 1.0]
    assert torch.equal(shaped(logits, top_p=1.0), torch.softmax(torch.tensor(logits).double(), 0))


def test_top_p_of_one_keeps_what_rounding_would_drop() -> None:
    logits = torch.tensor([0.0, *[-18.0] * 2000])
    probs = probs_from_logits(logits.expand(2, -1), [SamplingParams(), SamplingParams(top_p=0.9)])
    assert (probs[0] > 0).all()
    assert (probs[1] > 0).sum() == 1


def test_equal_logits_are_uniform() -> None:
    torch.testing.assert_close(shaped([5.0] * 7), torch.full((7,), 1 / 7, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_do_not_know_of_each_other(dtype: torch.dtype) -> None:
    params = [
        GREEDY,
        SamplingParams(),
        SamplingParams(temperature=0.3),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.4),
        SamplingParams(temperature=2.5, top_k=7, top_p=0.8),
        SamplingParams(temperature=1e-8),
        SamplingParams(top_k=1000),
    ]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(params), 40, generator=generator, dtype=dtype) * 3
    together = probs_from_logits(logits, params)
    assert together.dtype == dtype
    torch.testing.assert_close(together.sum(1), torch.ones(len(params), dtype=dtype))
    for i, row in enumerate(params):
        assert torch.equal(probs_from_logits(logits[i : i + 1], [row])[0], together[i])
    order = torch.randperm(len(params), generator=generator).tolist()
    assert torch.equal(
        probs_from_logits(logits[order], [params[i] for i in order]), together[order]
    )


# Drawing tokens.


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.5, 0.0, 3.0, 1.0, 0.01, 1.49])  # sum 6
    num_draws = 60_000
    drawn = draw_tokens(weights.expand(num_draws, -1), [99] * num_draws, range(num_draws))
    counts = torch.bincount(drawn, minlength=6).numpy()
    assert counts[1] == 0
    kept = weights.numpy() > 0
    expected = weights.numpy()[kept].astype(float) / 6.0 * num_draws
    result = chisquare(counts[kept], expected * (num_draws / expected.sum()), sum_check=False)
    assert result.pvalue > 1e-6


def test_few_and_many_entries_draw_the_same() -> None:
    keys, positions = [derive_keys(5, 0).target] * 200, list(range(200))
    narrow = torch.zeros(200, 400)
    generator = torch.Generator().manual_seed(0)
    for row in narrow:
        row[torch.randperm(400, generator=generator)[:5]] = torch.rand(5, generator=generator)
    noise = exponential_noise(keys, positions, 400, narrow.device)
    by_hand = (narrow.double() / noise).argmax(1)
    assert torch.equal(draw_tokens(narrow, keys, positions), by_hand)
    # A wide neighbour takes the whole batch down the other path.
    wide = torch.cat([narrow, torch.ones(400, 400)])
    drawn = draw_tokens(wide, keys + [1] * 400, positions + [0] * 400)
    assert torch.equal(drawn[:200], by_hand)


def test_draws_do_not_depend_on_the_scale_of_the_weights() -> None:
    weights = torch.rand(100, 30, generator=torch.Generator().manual_seed(0))
    draws = draw_tokens(weights, [7] * 100, range(100))
    assert torch.equal(draw_tokens(weights * 0.125, [7] * 100, range(100)), draws)


def test_equal_rows_with_equal_keys_draw_together() -> None:
    """Coupling: near rows with the same noise mostly agree."""
    generator = torch.Generator().manual_seed(0)
    p = torch.softmax(torch.randn(2000, 20, generator=generator), 1)
    q = torch.softmax(p.log() + 0.1 * torch.randn(2000, 20, generator=generator), 1)
    same = draw_tokens(p, [7] * 2000, range(2000)) == draw_tokens(q, [7] * 2000, range(2000))
    apart = draw_tokens(p, [7] * 2000, range(2000)) == draw_tokens(q, [8] * 2000, range(2000))
    assert same.double().mean() > 0.9
    assert apart.double().mean() < 0.3


# Drawing from a distribution as sent.


def distribution(probs: list[float], token_ids: list[int] | None = None) -> DraftDistribution:
    ids = None if token_ids is None else np.array(token_ids, dtype=np.uint32)
    return DraftDistribution(np.array(probs, dtype=np.float32), ids)


@pytest.mark.parametrize(
    ("uniform", "index"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (0.9999, 4)]
)
def test_draw_by_hand(uniform: float, index: int) -> None:
    probs = [0.0, 0.25, 0.0, 0.5, 0.25, 0.0]
    assert draw_from_distribution(distribution(probs), uniform) == index
    ids = [9, 8, 7, 6, 5, 4]
    assert draw_from_distribution(distribution(probs, ids), uniform) == ids[index]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(1, 200),
    share_of_zeros=st.floats(0.0, 0.95),
    uniform=st.one_of(
        st.floats(0.0, 1.0, exclude_max=True), st.sampled_from([0.0, 1 - 2**-32, 1 - 2**-53])
    ),
)
def test_what_has_no_mass_is_never_drawn(
    seed: int, size: int, share_of_zeros: float, uniform: float
) -> None:
    rng = np.random.default_rng(seed)
    probs = rng.random(size) * (rng.random(size) >= share_of_zeros)
    assume(probs.sum() > 0)
    q = DraftDistribution((probs / probs.sum()).astype(np.float32), None)
    assert q.probs[draw_from_distribution(q, uniform)] > 0


def test_draws_from_a_distribution_follow_it() -> None:
    q = distribution([0.5, 0.0, 0.2, 0.3], [7, 1, 5, 3])
    uniforms = (np.arange(1000) + 0.5) / 1000
    drawn = [draw_from_distribution(q, uniform) for uniform in uniforms]
    assert [drawn.count(i) for i in (7, 1, 5, 3)] == [500, 0, 200, 300]


# Truncation.


def test_truncation_keeps_the_likeliest_and_renormalises() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15], [0.0, 0.0, 1.0, 0.0, 0.0]])
    token_ids, kept = truncate_to_support(probs, 3)
    assert token_ids[0].tolist() == [1, 3, 4]
    torch.testing.assert_close(kept[0], torch.tensor([0.4, 0.3, 0.15]) / 0.85)
    torch.testing.assert_close(kept.sum(1), torch.ones(2))
    assert token_ids[1, 0] == 2
    assert kept[1].tolist() == [1.0, 0.0, 0.0]


def test_truncation_beyond_the_vocabulary_keeps_everything() -> None:
    probs = torch.tensor([[0.25, 0.75]])
    token_ids, kept = truncate_to_support(probs, 60)
    assert token_ids.tolist() == [[1, 0]]
    assert kept.tolist() == [[0.75, 0.25]]
