"""What a seed promises, and what no seed promises."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from scipy import stats

from tests.integration.checks import becomes_idle, generate, greedy_ids
from tests.services import Services, running
from tests.toy_models import save_bigram, save_noisy_copy, save_random_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [1, 2, 3, 1, 2, 3, 1]
NUM_TOKENS = 24
MODES: list[dict[str, Any]] = [
    {"speculation": False},
    *(
        {"drafter": drafter, "num_speculative_tokens": k}
        for drafter in ("ngram", "model")
        for k in (0, 2, 5)
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    folder = tmp_path_factory.mktemp("seeds")
    target = save_random_llama(folder / "target")
    draft = save_noisy_copy(target, folder / "draft", noise=0.03)
    settings = {"num_threads": 1}
    async with running(
        target,
        folder / "traces",
        draft_model=draft,
        drafter="model",
        target=settings,
        draft=settings | {"ngram_min_acceptance": 0.0},
    ) as services:
        yield services
        await becomes_idle(services)


async def sampled_ids(services: Services, **options: Any) -> tuple[int, ...]:
    options = {"temperature": 1.0, "max_tokens": NUM_TOKENS} | options
    return (await generate(services.client, PROMPT, **options)).token_ids


@pytest.mark.parametrize(
    "settings", [{"temperature": 1.0}, {"temperature": 2.0, "top_p": 0.9, "top_k": 20}]
)
async def test_a_seed_repeats_alone_in_company_and_in_every_mode(
    services: Services, settings: dict[str, Any]
) -> None:
    alone = await sampled_ids(services, seed=42, **settings)
    assert await sampled_ids(services, seed=42, **settings) == alone
    for _ in range(2):
        others = [sampled_ids(services, **settings) for _ in range(15)]
        ids, *_ = await asyncio.gather(sampled_ids(services, seed=42, **settings), *others)
        assert ids == alone
    for mode in MODES:
        result = await generate(
            services.client, PROMPT, max_tokens=NUM_TOKENS, seed=42, **settings, **mode
        )
        assert result.token_ids == alone, mode
        if mode.get("num_speculative_tokens"):
            assert result.speculation.num_draft_tokens > 0
        if mode.get("drafter") == "model" and mode["num_speculative_tokens"]:
            assert result.speculation.num_accepted_tokens > 0, mode
    together = await asyncio.gather(
        *[sampled_ids(services, seed=42, **settings, **mode) for mode in MODES]
    )
    assert set(together) == {alone}


async def test_seeds_differ_over_their_whole_range(services: Services) -> None:
    seeds = [0, 1, 2, 41, 2**32, 2**32 + 1, 2**63, 2**64 - 1]
    ids = await asyncio.gather(*[sampled_ids(services, seed=seed) for seed in seeds])
    assert len(set(ids)) == len(seeds)
    again = await asyncio.gather(*[sampled_ids(services, seed=seed) for seed in seeds])
    assert again == ids


@pytest.mark.parametrize("drafter", ["ngram", "model"])
async def test_rejection_with_a_fixed_draft_length_repeats(
    services: Services, drafter: str
) -> None:
    settings = {"acceptance": "rejection", "drafter": drafter, "num_speculative_tokens": 3}
    runs = [await sampled_ids(services, seed=7, **settings) for _ in range(3)]
    beside = await asyncio.gather(*[sampled_ids(services, seed=s, **settings) for s in (7, 8, 9)])
    assert {*runs, beside[0]} == {runs[0]}
    assert len(set(beside)) == 3


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
async def test_a_tiny_temperature_is_greedy(services: Services, acceptance: str) -> None:
    expected = await greedy_ids(services.client, PROMPT, max_tokens=NUM_TOKENS)
    for drafter in ("ngram", "model"):
        ids = await sampled_ids(services, temperature=1e-3, acceptance=acceptance, drafter=drafter)
        assert ids == expected


async def test_unseeded_runs_differ_and_a_huge_temperature_is_uniform(tmp_path: Path) -> None:
    """A32 and A56 on a flat bigram."""
    vocab_size = 64
    flat = np.full((vocab_size, vocab_size), 1 / vocab_size)
    steep = np.full((vocab_size, vocab_size), 0.5 / (vocab_size - 1))
    steep[:, 5] = 0.5
    for name, table in (("flat", flat), ("steep", steep)):
        model = save_bigram(tmp_path / name, table)
        settings = {"num_threads": 1}
        async with running(
            model,
            tmp_path / "traces",
            draft_model=model,
            drafter="model",
            target=settings,
            draft=settings,
        ) as services:
            if name == "flat":
                serial = [
                    (await generate(services.client, [1], max_tokens=6)).token_ids
                    for _ in range(40)
                ]
                assert len(set(serial)) >= 39  # 1 in 10^8 that two agree
                at_once = await asyncio.gather(
                    *[generate(services.client, [1], max_tokens=6) for _ in range(40)]
                )
                assert len({*serial, *(result.token_ids for result in at_once)}) >= 79
            results = await asyncio.gather(
                *[
                    generate(services.client, [1], max_tokens=1 + i % 3, temperature=1e4)
                    for i in range(250)
                ]
            )
            counts = Counter(result.token_ids[0] for result in results)
            counts.update(result.token_ids[-1] for result in results if len(result.token_ids) == 3)
            observed = [counts[token_id] for token_id in range(vocab_size)]
            assert stats.chisquare(observed).pvalue > 1e-6
