"""Too little memory, too many requests: everything is answered, and nothing differs."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from specdec.client import AsyncClient, Generation, GenerationError
from tests.integration.checks import eventually
from tests.services import running
from tests.toy_models import save_random_llama

VOCAB_SIZE = 64
NUM_TOKENS = 60
PROMPTS = [
    [random.Random(seed).randrange(VOCAB_SIZE) for _ in range(30 + seed)] for seed in range(16)
]
# A request grows to 30 + 15 + 60 tokens: 7 blocks of 16. Room for three of sixteen.
NUM_BLOCKS = 21


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llama(tmp_path_factory.mktemp("model"))


async def generate(client: AsyncClient, prompt: list[int], **options: Any) -> Generation:
    stream = client.generate(
        prompt, **({"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | options)
    )
    return await stream.collect()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}])
async def test_a_pool_for_three_serves_sixteen_alike(
    model: Path, tmp_path: Path, prefix_cache: bool, options: dict[str, Any]
) -> None:
    settings = {"num_blocks": NUM_BLOCKS, "prefix_cache": prefix_cache}
    async with running(
        model, tmp_path, draft_model=model, drafter="model", target=settings
    ) as services:
        engine = services.target.engine
        alone = [
            (await generate(services.client, prompt, **options)).token_ids for prompt in PROMPTS
        ]
        assert engine.num_preemptions == 0
        results = await asyncio.gather(
            *(generate(services.client, prompt, **options) for prompt in PROMPTS)
        )
        assert [result.token_ids for result in results] == alone
        assert engine.num_preemptions > 0
        await eventually(lambda: engine.num_sequences == 0, "idle again", timeout_s=20)
        assert engine.num_free_blocks == NUM_BLOCKS


async def test_too_many_sequences_are_refused_at_once_and_later_taken(
    model: Path, tmp_path: Path
) -> None:
    settings = {"num_blocks": NUM_BLOCKS, "max_sequences": 4}
    async with running(model, tmp_path, drafter="none", target=settings) as services:
        results = await asyncio.gather(
            *(generate(services.client, prompt) for prompt in PROMPTS), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, GenerationError)]
        assert 0 < len(refused) <= 12
        for error in refused:
            assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "TARGET_BUSY")
            assert error.retry_after_ms
            assert "4 sequences" in str(error)
        assert not [r for r in results if not isinstance(r, Generation | GenerationError)]
        await generate(services.client, PROMPTS[0])


async def test_too_much_kv_in_demand_is_refused(model: Path, tmp_path: Path) -> None:
    settings = {"num_blocks": NUM_BLOCKS, "max_overcommit": 1.0}
    async with running(model, tmp_path, drafter="none", target=settings) as services:
        results = await asyncio.gather(
            *(generate(services.client, prompt) for prompt in PROMPTS), return_exceptions=True
        )
        refused = [result for result in results if isinstance(result, GenerationError)]
        assert refused
        assert all("KV blocks" in str(error) for error in refused)
        assert len(refused) < len(PROMPTS)


async def test_a_request_larger_than_the_pool_is_invalid(model: Path, tmp_path: Path) -> None:
    async with running(model, tmp_path, drafter="none", target={"num_blocks": 4}) as services:
        with pytest.raises(GenerationError) as raised:
            await generate(services.client, PROMPTS[0] * 3)
        assert raised.value.code == "INVALID_ARGUMENT"
        assert "64" in str(raised.value)
        # One that fits is cut where the pool ends, like at the end of a context.
        result = await generate(services.client, PROMPTS[0], max_tokens=None)
        assert len(result.token_ids) == 64 - len(PROMPTS[0])
        assert result.finish_reason == "length"
