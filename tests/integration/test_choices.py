"""Several choices of one request: independent draws over one computed prompt."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from specdec.client import GenerationError
from tests.integration.checks import eventually
from tests.services import Services, running
from tests.toy_models import save_noisy_copy, save_random_llama

PROMPT = [random.Random(3).randrange(64) for _ in range(45)]
NUM_TOKENS = 30


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = save_random_llama(folder / "target")
    return target, save_noisy_copy(target, folder / "draft", noise=0.03)


def deployment(models: tuple[Path, Path], folder: Path, **options: Any) -> Any:
    return running(models[0], folder, draft_model=models[1], drafter="model", **options)


async def choices_of(services: Services, **options: Any) -> list[tuple[int, ...]]:
    stream = services.client.generate(
        PROMPT, **({"max_tokens": NUM_TOKENS, "ignore_eos": True} | options)
    )
    await stream.collect()
    return [result.token_ids for result in stream.results]


@pytest.mark.parametrize("prefix_cache", [True, False])
async def test_seeded_choices_are_the_same_in_every_mode(
    models: tuple[Path, Path], tmp_path: Path, prefix_cache: bool
) -> None:
    async with deployment(models, tmp_path, target={"prefix_cache": prefix_cache}) as services:
        expected = await choices_of(services, n=5, seed=4, speculation=False)
        assert len(set(expected)) == 5
        for options in (
            {"drafter": "ngram"},
            {"num_speculative_tokens": 1},
            {"num_speculative_tokens": 5},
        ):
            assert await choices_of(services, n=5, seed=4, **options) == expected
        # A choice does not depend on how many there are.
        assert await choices_of(services, n=2, seed=4) == expected[:2]
        assert await choices_of(services, n=1, seed=4) == expected[:1]


async def test_greedy_choices_are_alike(models: tuple[Path, Path], tmp_path: Path) -> None:
    async with deployment(models, tmp_path) as services:
        (alone,) = await choices_of(services, temperature=0.0)
        assert await choices_of(services, n=3, temperature=0.0) == [alone] * 3


async def test_the_prompt_is_computed_once(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Even without a prefix cache: the others fork the first, in the middle of a block."""
    async with deployment(models, tmp_path, target={"prefix_cache": False}) as services:
        stream = services.client.generate(
            PROMPT, n=4, max_tokens=3, ignore_eos=True, speculation=False
        )
        await stream.collect()
        cached = [result.usage.cached_prompt_tokens for result in stream.results]
        assert cached == [0] + [len(PROMPT) - 1] * 3
        # The prompt, and for each choice one row per token but for the first one's first.
        assert services.target.engine.stats.num_tokens == len(PROMPT) + 4 * 3 - 1
        engine = services.target.engine
        await eventually(lambda: engine.num_free_blocks == 512, "all blocks are given back")


async def test_each_choice_ends_by_itself(models: tuple[Path, Path], tmp_path: Path) -> None:
    async with deployment(models, tmp_path) as services:
        stream = services.client.generate(
            PROMPT, n=6, seed=9, max_tokens=NUM_TOKENS, stop_token_ids=list(range(0, 64, 8))
        )
        indices = [chunk.index async for chunk in stream]
        results = stream.results
        assert set(indices) == set(range(6))
        assert len({len(result.token_ids) for result in results}) > 1
        assert {result.finish_reason for result in results} >= {"stop"}
        for result in results:
            usage = result.usage
            assert usage.completion_tokens == len(result.token_ids)
            assert usage.prompt_tokens == len(PROMPT)
        reference = await choices_of(services, n=6, seed=9)
        for result, whole in zip(results, reference, strict=True):
            assert result.token_ids == whole[: len(result.token_ids)]


async def test_a_cancelled_request_leaves_nothing_behind(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    async with deployment(models, tmp_path) as services:
        engine, draft = services.target.engine, services.draft
        assert draft is not None
        for num_chunks in (0, 1, 5):
            stream = services.client.generate(PROMPT, n=8, max_tokens=400, ignore_eos=True)
            for _ in range(num_chunks):
                await anext(aiter(stream))
            await asyncio.sleep(0.01)
            stream.cancel()
            with pytest.raises(GenerationError):
                await stream.collect()
            await eventually(
                lambda: engine.num_sequences == 0 and draft.engine.num_sequences == 0,
                "sequences are released",
                timeout_s=10,
            )
            assert engine.num_free_blocks == 512
