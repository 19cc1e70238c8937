"""Unlike requests at once, and caches used again and again: each request's ids are its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers import MistralConfig

from specdec.client import AsyncClient, Generation, GenerationError
from tests.integration.checks import becomes_idle, generate, greedy_ids, reference_ids
from tests.services import Services, running
from tests.toy_models import save_noisy_copy, save_random_family, save_random_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB_SIZE = 64
UNSCRAPED: dict[str, Any] = {"metrics_port": None}
SMALL = UNSCRAPED | {"block_size": 4, "max_prefill_tokens": 8, "num_blocks": 256}
EVERY_DRAFT = {"ngram_min_acceptance": 0.0}
MODES: dict[str, dict[str, Any]] = {
    "plain": {"speculation": False},
    "ngram": {"drafter": "ngram", "num_speculative_tokens": 4},
    "model": {"drafter": "model", "num_speculative_tokens": 4},
}


def text(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB_SIZE) for _ in range(length)]


async def generate_all(
    client: AsyncClient, requests: Sequence[tuple[list[int], dict[str, Any]]], concurrency: int
) -> list[Generation]:
    """Runs requests, at most so many at once, in their order."""
    turns = asyncio.Semaphore(concurrency)

    async def run(prompt: list[int], options: dict[str, Any]) -> Generation:
        async with turns:
            return await generate(client, prompt, **options)

    return await asyncio.gather(*[run(prompt, options) for prompt, options in requests])


def drafting(result: Generation) -> tuple[int, int, tuple[int, ...]]:
    """What was drafted and accepted."""
    stats = result.speculation
    return (
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
        stats.num_accepted_tokens_per_position,
    )


# One target with a draft model near it.


@dataclass(frozen=True)
class Toy:
    """A running deployment and its target."""

    folder: Path
    services: Services

    @property
    def client(self) -> AsyncClient:
        return self.services.client


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = save_random_llama(folder / "target")
    return target, save_noisy_copy(target, folder / "draft", noise=0.03)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def toy(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Toy]:
    async with running(
        models[0],
        tmp_path_factory.mktemp("traces"),
        draft_model=models[1],
        drafter="model",
        target=SMALL,
        # So small that a few sequences left behind would leave no room.
        draft=SMALL | EVERY_DRAFT | {"num_blocks": 128},
        orchestrator=UNSCRAPED,
    ) as services:
        yield Toy(models[0], services)
        await becomes_idle(services)


async def test_drafting_goes_on_after_hundreds_of_requests(toy: Toy) -> None:
    """The 50 prompts of the beginning are drafted for at the end as they were then."""
    prompts = [text(7, seed) for seed in range(300)]
    options = {"temperature": 0.0, "max_tokens": 4, "drafter": "model", "num_speculative_tokens": 3}
    results = [await generate(toy.client, prompt, **options) for prompt in prompts]
    again = [await generate(toy.client, prompt, **options) for prompt in prompts[:50]]
    assert [drafting(result) for result in again] == [drafting(result) for result in results[:50]]
    # Nor does drafting fade on the way: the last 50 are as good as the first.
    rates = []
    for part in (results[:50], results[-50:]):
        num_drafted = sum(result.speculation.num_draft_tokens for result in part)
        num_accepted = sum(result.speculation.num_accepted_tokens for result in part)
        assert num_drafted > 80
        rates.append(num_accepted / num_drafted)
    assert 0.2 < rates[0] < 1
    assert abs(rates[0] - rates[1]) < 0.15  # the noise of two such samples
    await becomes_idle(toy.services)
    assert toy.services.draft is not None
    assert toy.services.draft.engine.num_sequences == 0


async def test_a_thousand_short_requests_of_one_draft_a_round(toy: Toy) -> None:
    chance = random.Random(1)
    stems = [text(length, seed=length) for length in (3, 4, 8, 13)]
    requests = [
        ([*chance.choice(stems), *text(chance.randrange(3), seed)], {"seed": seed % 50})
        for seed in range(1000)
    ]
    options = {"temperature": 1.0, "max_tokens": 3, "num_speculative_tokens": 1}
    acceptances = ("rejection", "coupled")
    results = await generate_all(
        toy.client,
        [
            (prompt, options | seed | {"acceptance": acceptances[i % 2]})
            for i, (prompt, seed) in enumerate(requests)
        ],
        concurrency=32,
    )
    assert {len(result.token_ids) for result in results} == {3}
    assert sum(result.usage.cached_prompt_tokens for result in results) > 1000
    counts = [drafting(result) for result in results]
    assert sum(accepted for _, accepted, _ in counts) > 100
    assert sum(drafted - accepted for drafted, accepted, _ in counts) > 100
    assert max(len(per_position) for *_, per_position in counts) == 1
    # Coupled output is the target's own draws; a token lost at a rejection would shift them.
    coupled = [i for i in range(1000) if acceptances[i % 2] == "coupled"][:50]
    plain = await generate_all(
        toy.client,
        [(requests[i][0], options | requests[i][1] | {"speculation": False}) for i in coupled],
        concurrency=8,
    )
    assert [results[i].token_ids for i in coupled] == [result.token_ids for result in plain]
    await becomes_idle(toy.services)


@pytest.mark.parametrize("mode", ["ngram", "model"])
async def test_equal_prompts_in_one_batch_get_equal_proposals(toy: Toy, mode: str) -> None:
    options = {"temperature": 0.0, "max_tokens": 12} | MODES[mode]
    for seed in range(4):
        # Some read over and over, so that there is something to look up.
        a = text(3, seed) * 4 if seed % 2 else text(11, seed)
        b, c = text(20, 100 + seed), text(4, 200 + seed) * 2
        a1, _, a2, _, a3 = together = await generate_all(
            toy.client, [(prompt, options) for prompt in (a, b, a, c, a)], concurrency=5
        )
        assert a1.token_ids == a2.token_ids == a3.token_ids
        assert drafting(a1) == drafting(a2) == drafting(a3)
        alone = [await generate(toy.client, prompt, **options) for prompt in (a, b, c)]
        for result, expected in zip(together[:2] + together[3:4], alone, strict=True):
            assert result.token_ids == expected.token_ids
            assert drafting(result) == drafting(expected)
    assert alone[0].speculation.num_draft_tokens > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [7, 8, 9, 16, 17])
async def test_prompts_around_a_chunk_cold_and_warm(toy: Toy, length: int, mode: str) -> None:
    """Chunks of 8, blocks of 4; a prompt of whole blocks leaves none or, made longer, one token."""
    prompt = text(length, seed=10 * length + list(MODES).index(mode))
    longer = [*prompt, 5]
    options = {"temperature": 0.0, "max_tokens": 12} | MODES[mode]
    results = [await generate(toy.client, tokens, **options) for tokens in (prompt, prompt, longer)]
    cached = [result.usage.cached_prompt_tokens for result in results]
    # All but the last token; of a block that is not whole, nothing.
    known = length - 1 if length % 4 == 0 else length - length % 4
    assert cached[:2] == [0, known]
    assert cached[2] >= length - length % 4
    expected, expected_longer = reference_ids(toy.folder, [prompt, longer], 12)
    assert [result.token_ids for result in results] == [expected, expected, expected_longer]


# Rows with proposals beside rows without.


@dataclass(frozen=True)
class Mixture:
    """Prompts an n-gram drafter has drafts for from the start, and some it never has any for."""

    matching: list[list[int]]
    not_matching: list[list[int]]
    expected: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def mixture(models: tuple[Path, Path]) -> Mixture:
    matching = [text(4, seed) * 4 for seed in range(4)]
    candidates = [random.Random(seed).sample(range(VOCAB_SIZE), 3) for seed in range(60)]
    references = reference_ids(models[0], [*matching, *candidates], 10)
    # Nothing ever repeats in these texts.
    chosen = [
        (prompt, ids)
        for prompt, ids in zip(candidates, references[4:], strict=True)
        if len({*prompt, *ids}) == 13
    ][:4]
    assert len(chosen) == 4
    return Mixture(
        matching, [prompt for prompt, _ in chosen], references[:4] + [ids for _, ids in chosen]
    )


@pytest.mark.parametrize("concurrency", [1, 2, 3, 8, 16])
async def test_rows_with_and_without_proposals_in_one_batch(
    toy: Toy, mixture: Mixture, concurrency: int
) -> None:
    prompts = mixture.matching + mixture.not_matching
    cases = [(i, name) for i in range(8) for name in ("ngram", "plain")]
    random.Random(concurrency).shuffle(cases)
    options = {"temperature": 0.0, "max_tokens": 10}
    requests = [(prompts[i], options | MODES[name]) for i, name in cases]
    results = await generate_all(toy.client, requests, concurrency)
    for (i, name), result in zip(cases, results, strict=True):
        assert result.token_ids == mixture.expected[i], (i, name)
        has_drafts = result.speculation.num_draft_tokens > 0
        assert has_drafts == (name == "ngram" and prompts[i] in mixture.matching)


# Prefixes that many prompts share.


@dataclass(frozen=True)
class Family:
    """Prompts with common beginnings, and their greedy continuations."""

    prompts: list[list[int]]
    expected: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def related(models: tuple[Path, Path]) -> Family:
    chance = random.Random(4)
    stems = [text(length, seed=length) for length in (8, 11, 16, 23)]
    stems += [[*stem, *text(9, seed=50 + len(stem))] for stem in stems]
    prompts = [
        [*chance.choice(stems), *text(chance.randrange(1, 6), seed=seed)] for seed in range(50)
    ]
    return Family(prompts, reference_ids(models[0], prompts, 6))


@pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
@pytest.mark.parametrize("mode", MODES)
async def test_prompts_that_share_prefixes_in_every_order(
    models: tuple[Path, Path], related: Family, tmp_path: Path, mode: str, order: str
) -> None:
    """Only what was verified enters the cache, so that nothing depends on who came before."""
    indices = {
        "forwards": list(range(50)),
        "backwards": list(range(49, -1, -1)),
        "shuffled": random.Random(0).sample(range(50), 50),
    }[order]
    options = {"temperature": 0.0, "max_tokens": 6} | MODES[mode]
    # Each order meets an empty cache, too small to keep everything.
    async with running(
        models[0],
        tmp_path,
        draft_model=models[1],
        drafter="model",
        target=SMALL | {"num_blocks": 100},
        draft=SMALL | EVERY_DRAFT | {"num_blocks": 100},
        orchestrator=UNSCRAPED,
    ) as services:
        requests = [(related.prompts[i], options) for i in indices]
        results = await generate_all(services.client, requests, concurrency=4)
        for i, result in zip(indices, results, strict=True):
            assert result.token_ids == related.expected[i], i
        assert sum(result.usage.cached_prompt_tokens for result in results) > 200
        drafted = sum(result.speculation.num_draft_tokens for result in results)
        assert (drafted > 0) == (mode != "plain")
        await becomes_idle(services)


# Prompts of very unlike and of very small lengths, with learnt and with rotary positions.


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_family(tmp_path_factory.mktemp(request.param) / "target", request.param)


async def test_long_and_short_prompts_in_one_batch(family: Path, tmp_path: Path) -> None:
    prompts = [text(length, seed=length) for length in (1, 7, 31, 200)]
    expected = reference_ids(family, prompts, 10)
    draft = save_noisy_copy(family, tmp_path / "draft", noise=0.02)
    async with running(
        family,
        tmp_path / "traces",
        draft_model=draft,
        drafter="model",
        target=SMALL | {"max_prefill_tokens": 64},
        draft=SMALL | EVERY_DRAFT,
        orchestrator=UNSCRAPED,
    ) as services:
        for mode in MODES.values():
            options = {"temperature": 0.0, "max_tokens": 10} | mode
            requests = [(prompt, options) for prompt in prompts]
            for concurrency in (4, 1):
                results = await generate_all(services.client, requests, concurrency)
                assert [result.token_ids for result in results] == expected, mode
        assert services.target.engine.stats.max_batch_size > 1
        await becomes_idle(services)


async def test_prompts_shorter_than_the_drafts(family: Path, tmp_path: Path) -> None:
    """Everything drafted is wrong, and a rollback reaches back to the first tokens."""
    prompts = [text(length, seed=40 + length) for length in range(1, 9)]
    prompts += [[token_id] for token_id in range(4)]
    expected = reference_ids(family, prompts, 8)
    # Learnt positions make models of a family alike: a draft of another family is unrelated.
    draft = save_random_llama(tmp_path / "draft", seed=99, num_layers=1)
    async with running(
        family,
        tmp_path / "traces",
        draft_model=draft,
        drafter="model",
        target=SMALL,
        draft=SMALL | EVERY_DRAFT,
        orchestrator=UNSCRAPED,
    ) as services:
        options = {"temperature": 0.0, "max_tokens": 8, "num_speculative_tokens": 8}
        for drafter in ("model", "ngram"):
            requests = [(prompt, options | {"drafter": drafter}) for prompt in prompts]
            alone = await generate(services.client, requests[0][0], **requests[0][1])
            assert alone.token_ids == expected[0]
            results = await generate_all(services.client, requests, concurrency=12)
            assert [result.token_ids for result in results] == expected, drafter
            counts = [drafting(result) for result in results]
            num_drafted = sum(drafted for drafted, *_ in counts)
            num_accepted = sum(accepted for _, accepted, _ in counts)
            if drafter == "model":
                assert num_accepted < 0.2 * num_drafted
        await becomes_idle(services)


# A sliding window.

WINDOW = 8


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Mistral that sees 8 tokens, and a draft model near it."""
    folder = tmp_path_factory.mktemp("windowed")
    target = save_random_family(folder / "target", "mistral")
    config = MistralConfig.from_pretrained(target)
    config.sliding_window = WINDOW
    config.save_pretrained(target)
    return target, save_noisy_copy(target, folder / "draft", noise=0.03)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def window_services(
    windowed: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Services]:
    async with running(
        windowed[0],
        tmp_path_factory.mktemp("traces"),
        draft_model=windowed[1],
        drafter="model",
        target=SMALL | {"num_blocks": 160},
        draft=SMALL | EVERY_DRAFT | {"num_blocks": 160},
        orchestrator=UNSCRAPED,
    ) as services:
        yield services
        await becomes_idle(services)


@pytest.mark.parametrize("drafter", ["ngram", "model"])
async def test_drafts_across_a_window_that_wraps(
    windowed: tuple[Path, Path], window_services: Services, drafter: str
) -> None:
    prompts = [text(length, seed=length) for length in range(1, 13)]
    expected = reference_ids(windowed[0], prompts, 64)
    requests = [
        (
            prompt,
            {
                "temperature": 0.0,
                "max_tokens": 64,
                "drafter": drafter,
                "num_speculative_tokens": 1 + i % 8,
            },
        )
        for i, prompt in enumerate(prompts)
    ]
    results = await generate_all(window_services.client, requests, concurrency=12)
    assert [result.token_ids for result in results] == expected
    counts = [drafting(result) for result in results]
    num_drafted = sum(drafted for drafted, *_ in counts)
    num_accepted = sum(accepted for _, accepted, _ in counts)
    assert 0.1 * num_drafted < num_accepted < num_drafted


async def test_requests_that_cross_the_window_leave_nothing_behind(
    window_services: Services,
) -> None:
    services = window_services
    canary = text(6, seed=1)
    expected = await greedy_ids(services.client, canary, max_tokens=20)
    turns = asyncio.Semaphore(16)
    ends: list[str] = []

    async def run(i: int) -> None:
        chance = random.Random(i)
        async with turns:
            stream = services.client.generate(
                text(chance.randrange(1, 2 * WINDOW), seed=i),
                temperature=chance.choice([0.0, 1.0]),
                max_tokens=chance.randrange(WINDOW, 2 * WINDOW),
                drafter=chance.choice(["ngram", "model"]),
                num_speculative_tokens=chance.randrange(1, 9),
            )
            num_tokens = 0
            try:
                async for chunk in stream:
                    num_tokens += len(chunk.tokens)
                    if i % 3 == 0 and num_tokens >= chance.randrange(1, WINDOW):
                        stream.cancel()
                ends.append("FINISHED")
            except GenerationError as error:
                ends.append(error.code)

    await asyncio.gather(*[run(i) for i in range(210)])
    assert ends.count("CANCELLED") > 60
    assert ends.count("CANCELLED") + ends.count("FINISHED") == 210
    await becomes_idle(services)
    assert services.target.engine.num_free_blocks == 160
    assert await greedy_ids(services.client, canary, max_tokens=20) == expected
