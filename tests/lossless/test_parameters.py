"""Sampling parameters bend the law exactly as they should, in every mode, mixed in one batch.

A bigram target whose law under each parameter can be written down: by a table, or, where
the whole output counts, by the probabilities of all outputs of three tokens.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from tests.lossless.test_distribution import (
    CONCURRENCY,
    DRAFT,
    LEVEL,
    TARGET,
    deployment,
    find_biases,
    g_test,
    ids_of,
    sample,
)
from tests.services import Services
from tests.toy_models import save_bigram

NUM_DRAWS = 1_500
VOCAB_SIZE = len(TARGET)
MODES: list[dict[str, Any]] = [
    {"acceptance": "rejection"},
    {"acceptance": "coupled"},
    {"drafter": "ngram"},
    {"speculation": False},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("bigrams")
    draft = DRAFT / DRAFT.sum(axis=1, keepdims=True)
    return save_bigram(folder / "target", TARGET), save_bigram(folder / "draft", draft)


def normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum(axis=-1, keepdims=True)


def without(*pairs: tuple[int, int]) -> np.ndarray:
    """The table without some tokens after some others."""
    table = TARGET.copy()
    for before, token_id in pairs:
        table[before, token_id] = 0.0
    return normalised(table)


everywhere = range(VOCAB_SIZE)
TABLES: list[tuple[dict[str, Any], np.ndarray]] = [
    (
        {"min_p": 0.6},
        normalised(
            np.where(0.6 * TARGET.max(axis=1, keepdims=True) - 1e-12 <= TARGET, TARGET, 0.0)
        ),
    ),
    (
        {"logit_bias": {1: 1.0, 4: -0.7}},
        normalised(TARGET * np.exp([0.0, 1.0, 0.0, 0.0, -0.7, 0.0])),
    ),
    ({"allowed_token_ids": [0, 1, 2, 4]}, without(*itertools.product(everywhere, [3, 5]))),
    ({"bad_words": ["t2"]}, without(*itertools.product(everywhere, [2]))),
    ({"bad_words": ["t1 t4", "t4 t1"]}, without((1, 4), (4, 1))),
    (
        {"min_p": 0.2, "temperature": 0.7, "logit_bias": {0: 0.5}, "top_k": 4},
        np.empty(0),  # filled in below
    ),
]


def combined() -> np.ndarray:
    """Bias, then temperature, then top-k (ties are kept), then min-p."""
    weights = (TARGET * np.exp([0.5, 0, 0, 0, 0, 0])) ** (1 / 0.7)
    fourth = np.sort(weights, axis=1)[:, [-4]]
    kept = np.where(weights >= fourth * (1 - 1e-9), weights, 0.0)
    kept = np.where(kept >= 0.2 * kept.max(axis=1, keepdims=True), kept, 0.0)
    return normalised(kept)


TABLES[-1] = (TABLES[-1][0], combined())


async def test_tables(models: tuple[Path, Path], tmp_path: Path) -> None:
    kinds = [options | mode for options, _ in TABLES for mode in MODES]
    async with deployment(models, tmp_path) as services:
        results = await sample(services, NUM_DRAWS * len(TABLES), kinds)
        info = await services.client.model_info()
    outputs = ids_of(results)
    for number, (options, table) in enumerate(TABLES):
        chosen = [o for i, o in enumerate(outputs) if i % len(kinds) // len(MODES) == number]
        assert not find_biases(chosen, table), options
    assert info.load.num_redraw_mismatches == 0
    assert sum(result.speculation.num_accepted_tokens for result in results) > NUM_DRAWS


# Penalties: the law of three tokens.

# Of opposite signs, so that repeated tokens are common and each penalty alone shows: of 1,000
# simulated runs of the test, the largest p-value of any wrong law below was 1e-25.
PENALTIES = {"repetition_penalty": 1.6, "presence_penalty": 0.8, "frequency_penalty": -1.5}
PROMPT = [4, 4, 1]


def law_of_three_tokens(**params: float) -> np.ndarray:
    """[V, V, V] probabilities of all outputs, from the table's logits."""
    law = np.zeros((VOCAB_SIZE,) * 3)
    with np.errstate(divide="ignore"):
        # As the model has them; penalties change what is not the same up to a constant.
        logits = np.maximum(np.log(TARGET), -1e9)
    for output in itertools.product(everywhere, repeat=3):
        prob = 1.0
        for position, token_id in enumerate(output):
            before, made = [*PROMPT, *output[:position]], output[:position]
            row = logits[before[-1]].copy()
            for i in everywhere:
                if i in before:
                    factor = params["repetition_penalty"]
                    row[i] = row[i] / factor if row[i] > 0 else row[i] * factor
                row[i] -= params["frequency_penalty"] * made.count(i)
                row[i] -= params["presence_penalty"] * (i in made)
            weights = np.exp(row - row.max())
            prob *= weights[token_id] / weights.sum()
        law[output] = prob
    return law


async def three_tokens(
    services: Services, count: int, modes: list[dict[str, Any]], **params: Any
) -> list[tuple[int, ...]]:
    now = asyncio.Semaphore(CONCURRENCY)

    async def run(i: int) -> tuple[int, ...]:
        async with now:
            stream = services.client.generate(
                PROMPT, max_tokens=3, num_speculative_tokens=2, **(params | modes[i % len(modes)])
            )
            return (await stream.collect()).token_ids

    return list(await asyncio.gather(*(run(i) for i in range(count))))


def check_law(outputs: Iterable[tuple[int, ...]], law: np.ndarray) -> float:
    counts = np.zeros_like(law)
    for output in outputs:
        counts[output] += 1
    g, freedom = g_test(counts.ravel(), law.ravel())
    return float(chi2.sf(g, freedom))


async def test_penalties(models: tuple[Path, Path], tmp_path: Path) -> None:
    async with deployment(models, tmp_path) as services:
        outputs = await three_tokens(services, 2_000, MODES, **PENALTIES)
    assert check_law(outputs, law_of_three_tokens(**PENALTIES)) > LEVEL
    # The test would see a penalty that is left out, or one that is counted twice.
    for name, wrong in (
        ("repetition_penalty", 1.0),
        ("repetition_penalty", 1.6**2),
        ("presence_penalty", 0.0),
        ("presence_penalty", 1.6),
        ("frequency_penalty", 0.0),
        ("frequency_penalty", -3.0),
    ):
        assert check_law(outputs, law_of_three_tokens(**PENALTIES | {name: wrong})) < LEVEL, name


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
async def test_min_tokens_and_end_ids(
    models: tuple[Path, Path], tmp_path: Path, acceptance: str
) -> None:
    """Token 2 ends; before three tokens it is masked, then it is as likely as ever."""
    async with deployment(models, tmp_path) as services:
        now = asyncio.Semaphore(CONCURRENCY)

        async def run(i: int) -> tuple[int, ...]:
            async with now:
                stream = services.client.generate(
                    [i % 4],
                    max_tokens=12,
                    min_tokens=3,
                    stop_token_ids=[2],
                    num_speculative_tokens=4,
                    acceptance=acceptance,
                )
                return (await stream.collect()).token_ids

        outputs = await asyncio.gather(*(run(i) for i in range(700)))
    assert all(2 not in output[:3] and 2 not in output[:-1] for output in outputs)
    masked = without(*itertools.product(everywhere, [2]))
    assert not find_biases([output[:3] for output in outputs], masked)
    after = [[*output[2:4]] for output in outputs]
    counts = np.zeros_like(TARGET)
    for before, token_id in after:
        counts[before, token_id] += 1
    for before in everywhere:
        if counts[before].sum() > 50:
            g, freedom = g_test(counts[before], TARGET[before])
            assert chi2.sf(g, freedom) > LEVEL
