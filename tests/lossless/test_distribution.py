"""The sampled output follows the target's distribution, end to end.

Real servers and streams over a bigram target, whose table of probabilities is
known: after token i every token is a draw from row i. Each row of the tables is
its own pair (p, q): near-flat, peaky on a rare token, p ≈ q, disjoint supports,
skewed against flat, zeros inside the draft's support.

Per row, and per pair of the two tokens before (which also shows dependence
between neighbours), a G-test at 1e-6; the G of all rows together is tested too.

Power: 10,000 draws a configuration catch, with probability 0.99, a bias of total
variation 0.10 in one row of average weight, or one of 0.05 in every row alike.
SPECDEC_TEST_DRAWS=64000 makes that 0.04 and 0.02. Faulty rules bend more, as the
mutants at the end show; what is smaller is left to the exact enumeration in
tests/target_service/test_acceptance.py.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import xlogy
from scipy.stats import chi2

import target_service.acceptance
import target_service.model_runner
from draft_service.drafter import Drafted, DraftSequence
from draft_service.model_drafter import ModelDrafter
from specdec.client import Generation
from specdec.types import DraftDistribution
from tests.services import Services, running
from tests.toy_models import save_bigram

NUM_DRAWS = int(os.environ.get("SPECDEC_TEST_DRAWS", "10000"))
NUM_MUTANT_DRAWS = 4_000
LEVEL = 1e-6
MIN_EXPECTED = 10.0
CONCURRENCY = 32
SPARSE_SUPPORT = 3

TARGET = np.array(
    [
        [0.18, 0.16, 0.16, 0.17, 0.16, 0.17],
        [0.02, 0.18, 0.20, 0.20, 0.20, 0.20],
        [0.30, 0.10, 0.25, 0.15, 0.15, 0.05],
        [0.30, 0.00, 0.30, 0.00, 0.40, 0.00],
        [0.05, 0.45, 0.05, 0.25, 0.05, 0.15],
        [0.00, 0.30, 0.20, 0.30, 0.00, 0.20],
    ]
)
DRAFT = np.array(
    [
        [0.30, 0.10, 0.20, 0.08, 0.24, 0.08],
        [0.90, 0.04, 0.025, 0.015, 0.01, 0.01],
        [0.3000003, 0.1, 0.2499999, 0.15, 0.1499998, 0.05],
        [0.00, 0.30, 0.00, 0.30, 0.00, 0.40],
        [0.16, 0.17, 0.18, 0.15, 0.19, 0.15],
        [0.12, 0.10, 0.20, 0.08, 0.45, 0.05],
    ]
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("bigrams")
    draft = DRAFT / DRAFT.sum(axis=1, keepdims=True)
    return save_bigram(folder / "target", TARGET), save_bigram(folder / "draft", draft)


@asynccontextmanager
async def deployment(
    models: tuple[Path, Path], trace_dir: Path, **orchestrator: Any
) -> AsyncIterator[Services]:
    pool = {"block_size": 64, "num_blocks": CONCURRENCY * 8, "num_threads": 1}
    async with running(
        models[0],
        trace_dir,
        draft_model=models[1],
        drafter="model",
        target=pool,
        draft=pool | {"ngram_min_acceptance": 0.0, "sparse_support": SPARSE_SUPPORT},
        orchestrator=orchestrator,
    ) as services:
        yield services


async def sample(
    services: Services, num_draws: int, options: Sequence[dict[str, Any]]
) -> list[Generation]:
    """Draws about `num_draws` tokens, in requests that take turns with their options."""
    max_tokens = 250
    running_now = asyncio.Semaphore(CONCURRENCY)

    async def run(i: int) -> Generation:
        async with running_now:
            stream = services.client.generate(
                [i % 4],
                **{"max_tokens": max_tokens, "num_speculative_tokens": 3 + i % 3}
                | options[i % len(options)],
            )
            return await stream.collect()

    return await asyncio.gather(*[run(i) for i in range(-(-num_draws // max_tokens))])


def g_test(counts: np.ndarray, probs: np.ndarray) -> tuple[float, int]:
    """Compares counts with probabilities.

    Args:
        counts: [V] draws.
        probs: [V] law to be tested.

    Returns:
        G and its degrees of freedom, cells with few expected draws merged;
        infinite when something impossible was drawn.
    """
    if counts[probs == 0].any():
        return np.inf, 1
    expected = counts.sum() * probs
    order = np.argsort(expected)
    counts, expected = counts[order].astype(float), expected[order]
    # The rarest cells become one, with the first that makes it large enough.
    first = min(int((np.cumsum(expected) < MIN_EXPECTED).sum()) + 1, len(expected))
    counts = np.concatenate(([counts[:first].sum()], counts[first:]))
    expected = np.concatenate(([expected[:first].sum()], expected[first:]))
    terms = xlogy(counts, counts / expected)
    return 2.0 * float(terms.sum()), len(expected) - 1


def find_biases(outputs: Iterable[Sequence[int]], table: np.ndarray) -> list[str]:
    """Says where outputs do not follow the table; the first token of each is left out."""
    after: dict[tuple[int, ...], np.ndarray] = defaultdict(lambda: np.zeros(len(table)))
    for output in outputs:
        for previous, token_id in itertools.pairwise(output):
            after[(previous,)][token_id] += 1
        for before, previous, token_id in zip(output, output[1:], output[2:], strict=False):
            after[before, previous][token_id] += 1
    biases = []
    total, freedom = 0.0, 0
    for context, counts in sorted(after.items()):
        g, df = g_test(counts, table[context[-1]])
        if len(context) == 1:
            total, freedom = total + g, freedom + df
        if df and chi2.sf(g, df) < LEVEL:
            shares = np.round(counts / counts.sum(), 3)
            biases.append(
                f"after {context}: {shares} of {counts.sum():.0f}, p {chi2.sf(g, df):.1e}"
            )
    if chi2.sf(total, freedom) < LEVEL:
        biases.append(f"all rows: p {chi2.sf(total, freedom):.1e}")
    return biases


def ids_of(generations: Iterable[Generation]) -> list[tuple[int, ...]]:
    return [generation.token_ids for generation in generations]


def cut(draft: np.ndarray) -> np.ndarray:
    """The draft's table as it travels SPARSE."""
    cutoff = np.sort(draft, axis=1)[:, [-SPARSE_SUPPORT]]
    kept = np.where(draft >= cutoff, draft, 0.0)
    return kept / kept.sum(axis=1, keepdims=True)


def check_acceptance(generations: Iterable[Generation], draft: np.ndarray) -> None:
    """Of drafts after token i a share Σ min(p_i, q_i) is accepted, within 4 σ."""
    rates = np.minimum(TARGET, draft).sum(axis=1)
    num_accepted, expected, variance = 0, 0.0, 0.0
    for generation in generations:
        for before, token in itertools.pairwise(generation.tokens):
            if token.source in ("accepted", "recovered"):
                num_accepted += token.source == "accepted"
                expected += rates[before.id]
                variance += rates[before.id] * (1 - rates[before.id])
    assert variance > 500
    assert abs(num_accepted - expected) < 4 * variance**0.5


def seeded(**options: Any) -> list[dict[str, Any]]:
    """Options of many requests with a seed each: the same draws in every run."""
    return [options | {"seed": 1_000 + i} for i in range(4_000)]


async def test_rejection_with_sparse_q(models: tuple[Path, Path], tmp_path: Path) -> None:
    async with deployment(models, tmp_path) as services:
        results = await sample(services, NUM_DRAWS, seeded(acceptance="rejection"))
        info = await services.client.model_info()
    assert not find_biases(ids_of(results), TARGET)
    check_acceptance(results, cut(DRAFT))
    assert info.load.num_redraw_mismatches == 0


async def test_rejection_with_dense_q(models: tuple[Path, Path], tmp_path: Path) -> None:
    async with deployment(models, tmp_path, draft_form="dense") as services:
        results = await sample(services, NUM_DRAWS, seeded(acceptance="rejection"))
        info = await services.client.model_info()
    assert not find_biases(ids_of(results), TARGET)
    check_acceptance(results, DRAFT)
    assert info.load.num_redraw_mismatches == 0


async def test_match_with_coupled_drafts(models: tuple[Path, Path], tmp_path: Path) -> None:
    async with deployment(models, tmp_path) as services:
        results = await sample(services, NUM_DRAWS, [{"acceptance": "coupled"}])
    assert not find_biases(ids_of(results), TARGET)
    assert sum(result.speculation.num_accepted_tokens for result in results) > NUM_DRAWS / 10


async def test_match_with_ngram_drafts(models: tuple[Path, Path], tmp_path: Path) -> None:
    async with deployment(models, tmp_path) as services:
        results = await sample(services, NUM_DRAWS, seeded(drafter="ngram", acceptance="rejection"))
    assert not find_biases(ids_of(results), TARGET)
    assert sum(result.speculation.num_accepted_tokens for result in results) > NUM_DRAWS / 20


async def test_plain_decoding(models: tuple[Path, Path], tmp_path: Path) -> None:
    async with deployment(models, tmp_path) as services:
        results = await sample(services, NUM_DRAWS, seeded(speculation=False))
    assert not find_biases(ids_of(results), TARGET)
    assert not sum(result.speculation.num_draft_tokens for result in results)


async def test_a_mixture_in_one_batch(models: tuple[Path, Path], tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"acceptance": "rejection"},
        {"acceptance": "coupled"},
        {"drafter": "ngram"},
        {"speculation": False},
        {"temperature": 0.5, "acceptance": "rejection"},
        {"temperature": 0.0},
        {"top_k": 2, "acceptance": "rejection"},
    ]
    async with deployment(models, tmp_path) as services:
        results = await sample(services, NUM_DRAWS, kinds)
    outputs = ids_of(results)
    squared = TARGET**2 / (TARGET**2).sum(axis=1, keepdims=True)
    second = np.sort(TARGET, axis=1)[:, [-2]]
    top2 = np.where(second <= TARGET, TARGET, 0.0)
    tables = [TARGET] * 4 + [squared, None, top2 / top2.sum(axis=1, keepdims=True)]
    for table in (TARGET, squared, tables[-1]):
        chosen = [output for i, output in enumerate(outputs) if tables[i % len(kinds)] is table]
        assert not find_biases(chosen, table)


# Mutants: each bends one rule, and the tests above must notice.


async def biases_of(
    services: Services, table: np.ndarray, num_draws: int = NUM_MUTANT_DRAWS, **options: Any
) -> tuple[list[str], int]:
    """Runs rejection; returns the biases and the number of redraw mismatches."""
    results = await sample(services, num_draws, seeded(acceptance="rejection", **options))
    info = await services.client.model_info()
    return find_biases(ids_of(results), table), info.load.num_redraw_mismatches


# Near the draft once that is cut to two tokens: there the mutant's harm is largest.
NEAR_TARGET = np.array([np.roll([0.55, 0.35, 0.06, 0.04], i) for i in range(4)])
NEAR_DRAFT = np.array([np.roll([0.45, 0.30, 0.15, 0.10], i) for i in range(4)])

Drawn = list[tuple[int, DraftDistribution | None]]


def truncate_after_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the drafter send q cut to two tokens, of which the drawn one need not be one."""
    draw = ModelDrafter._sample

    def mutant(drafter: ModelDrafter, sequences: list[DraftSequence], probs: torch.Tensor) -> Drawn:
        drawn: Drawn = []
        for token_id, q in draw(drafter, sequences, probs):
            assert q is not None
            sent = np.where(q.probs >= np.sort(q.probs)[-2], q.probs, 0.0).astype(np.float32)
            drawn.append((token_id, DraftDistribution(sent / sent.sum(), q.token_ids)))
        return drawn

    monkeypatch.setattr(ModelDrafter, "_sample", mutant)


@pytest.fixture
def near_models(tmp_path: Path) -> tuple[Path, Path]:
    return save_bigram(tmp_path / "p", NEAR_TARGET), save_bigram(tmp_path / "q", NEAR_DRAFT)


async def test_truncation_after_sampling_is_counted_and_does_no_harm(
    near_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Harmless only because the target goes on with its own draw: see `redraw`."""
    truncate_after_sampling(monkeypatch)
    async with deployment(near_models, tmp_path) as services:
        biases, num_mismatches = await biases_of(
            services, NEAR_TARGET, num_draws=10_000, num_speculative_tokens=1
        )
    assert num_mismatches > 1_000
    assert not biases


async def test_truncation_after_sampling_is_seen_without_the_redraw_check(
    near_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate_after_sampling(monkeypatch)
    monkeypatch.setattr(target_service.model_runner, "is_redrawn", lambda chain: True)
    async with deployment(near_models, tmp_path) as services:
        biases, num_mismatches = await biases_of(services, NEAR_TARGET)
    assert num_mismatches == 0
    assert biases


def accept_always(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(target_probs)


def resample_from_p(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    return target_probs


def one_uniform_per_block(keys: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    first: dict[int, int] = {}
    for key, position in zip(keys, positions, strict=True):
        first.setdefault(key, position)
    draws = [target_service.acceptance.uniform_prob(key, first[key]) for key in keys]
    return torch.tensor(draws, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("accept_probs", accept_always),
        ("residual_probs", resample_from_p),
        ("uniform_probs", one_uniform_per_block),
    ],
)
async def test_a_bent_acceptance_rule_is_seen(
    name: str,
    mutant: Callable[..., Any],
    models: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(target_service.acceptance, name, mutant)
    async with deployment(models, tmp_path) as services:
        biases, _ = await biases_of(services, TARGET)
    assert biases


async def test_censoring_is_seen(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that keeps back what it drew with low q breaks the law, and no redraw tells."""
    draw = ModelDrafter._draw

    def mutant(
        drafter: ModelDrafter, sequences: list[DraftSequence], logits: torch.Tensor
    ) -> list[Drafted]:
        results = []
        for result in draw(drafter, sequences, logits):
            q = result.draft_probs[0]
            ids = np.arange(len(q.probs)) if q.token_ids is None else q.token_ids
            is_low = q.probs[ids == result.token_ids[0]][0] < 0.35
            if is_low:
                result = replace(result, token_ids=[], draft_probs=[], is_final=True)
            results.append(result)
        return results

    monkeypatch.setattr(ModelDrafter, "_draw", mutant)
    async with deployment(models, tmp_path) as services:
        biases, num_mismatches = await biases_of(services, TARGET)
    assert biases
    assert num_mismatches == 0
