from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from specdec.randomness import (
    Purpose,
    _philox,
    _philox_scalar,
    derive_keys,
    exponential_noise,
    exponential_noise_at,
    fresh_seed,
    uniform_prob,
    uniform_probs,
)

CPU = torch.device("cpu")
KEY = 0x0123_4567_89AB_CDEF


# Known answers of the Random123 distribution; the key's low word comes first.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            0xFFFFFFFF_FFFFFFFF,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(
    counter: tuple[int, int, int, int], key: int, expected: tuple[int, ...]
) -> None:
    assert _philox_scalar(counter, key) == expected


def test_vectors_are_the_scalar_function() -> None:
    keys = [0, KEY, 2**64 - 1, 2**63, 12345]
    positions = [0, 1, 2**32 - 1, 2**32, 2**40 + 7]
    blocks = torch.tensor([0, 1, 7, 2**32 - 1]).expand(len(keys), -1)
    words = _philox(blocks, keys, positions)
    for (i, (key, position)), (j, block) in itertools.product(
        enumerate(zip(keys, positions, strict=True)), enumerate(blocks[0].tolist())
    ):
        scalar = _philox_scalar((block, position & 0xFFFFFFFF, position >> 32, 0), key)
        assert tuple(int(word[i, j]) for word in words) == scalar


@pytest.mark.parametrize("num_rows", [0, 1, 12, 13, 100])
def test_uniforms_do_not_depend_on_how_many_are_drawn(num_rows: int) -> None:
    keys = [KEY + i for i in range(num_rows)]
    positions = [10 * i for i in range(num_rows)]
    drawn = uniform_probs(keys, positions)
    assert drawn.dtype == torch.float64
    assert drawn.tolist() == [uniform_prob(*row) for row in zip(keys, positions, strict=True)]


def test_noise_does_not_depend_on_the_vocabulary_or_the_batch() -> None:
    keys, positions = [KEY, 3, KEY], [5, 5, 6]
    large = exponential_noise(keys, positions, 1003, CPU)
    for vocab_size in (1, 2, 3, 4, 5, 1000):
        small = exponential_noise(keys, positions, vocab_size, CPU)
        assert torch.equal(small, large[:, :vocab_size])
    for i in range(3):
        alone = exponential_noise(keys[i : i + 1], positions[i : i + 1], 1003, CPU)
        assert torch.equal(alone[0], large[i])


def test_single_entries_are_those_of_the_dense_noise() -> None:
    keys, positions = [KEY, 3, 2**64 - 1], [5, 2**33, 6]
    rows = torch.tensor([0, 0, 2, 1, 1, 2, 0])
    token_ids = torch.tensor([0, 1, 2, 3, 4, 998, 500])
    dense = exponential_noise(keys, positions, 999, CPU)
    entries = exponential_noise_at(keys, positions, rows, token_ids)
    assert torch.equal(entries, dense[rows, token_ids])


def test_everything_that_names_a_draw_changes_it() -> None:
    keys = [
        key
        for seed, choice in itertools.product((0, 1, 2**64 - 1), (0, 1, 2))
        for key in (lambda k: (k.propose, k.accept, k.residual, k.target))(
            derive_keys(seed, choice)
        )
    ]
    assert len(keys) == 9 * len(Purpose)
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    draws = {uniform_prob(key, position) for key in keys for position in range(50)}
    # 1800 draws of 32 bits collide about 4e-4 times.
    assert len(draws) == len(keys) * 50


def test_keys_are_a_pure_function() -> None:
    assert derive_keys(7, 3) == derive_keys(7, 3)


def test_fresh_seeds_differ() -> None:
    seeds = {fresh_seed() for _ in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_uniforms_are_uniform_and_below_one() -> None:
    draws = uniform_probs([KEY] * 100_000, range(100_000)).numpy()
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert stats.kstest(draws, "uniform").pvalue > 1e-6


def test_the_largest_word_is_still_below_one() -> None:
    assert (2**32 - 1) * 2.0**-32 < 1.0
    assert float(np.float64(2**32 - 1 + 0.5) * 2.0**-32) < 1.0


def test_noise_is_exponential_along_tokens_and_along_positions() -> None:
    along_tokens = exponential_noise([KEY], [3], 100_000, CPU)[0]
    along_positions = exponential_noise([KEY] * 100_000, range(100_000), 1, CPU)[:, 0]
    for noise in (along_tokens, along_positions):
        assert noise.min() > 0.0
        assert torch.isfinite(noise).all()
        assert stats.kstest(noise.numpy(), "expon").pvalue > 1e-6


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 16])
def test_neighbours_are_independent(lag: int) -> None:
    along_positions = uniform_probs([KEY] * 50_000, range(50_000)).numpy()
    along_keys = uniform_probs(
        [derive_keys(seed, 0).accept for seed in range(5_000)], [9] * 5_000
    ).numpy()
    along_tokens = exponential_noise([KEY], [3], 50_000, CPU)[0].numpy()
    for draws in (along_positions, along_keys, along_tokens):
        bins = np.searchsorted(np.quantile(draws, [0.25, 0.5, 0.75]), draws)
        table = np.zeros((4, 4))
        np.add.at(table, (bins[:-lag], bins[lag:]), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-6


def test_purposes_are_independent() -> None:
    keys = [derive_keys(seed, 0) for seed in range(20_000)]
    first = uniform_probs([k.propose for k in keys], [4] * len(keys)).numpy()
    second = uniform_probs([k.accept for k in keys], [4] * len(keys)).numpy()
    table, _, _ = np.histogram2d(first, second, bins=5, range=[[0, 1], [0, 1]])
    assert stats.chi2_contingency(table).pvalue > 1e-6
