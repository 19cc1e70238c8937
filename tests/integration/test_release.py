"""Whatever ends a request, everything it held is given back."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from pathlib import Path

import pytest

from specdec.client import AsyncClient, GenerationError
from tests.integration.checks import becomes_idle, eventually, generate, greedy_ids
from tests.services import Services, running
from tests.toy_models import save_noisy_copy, save_random_llama

CANARY = [9, 8, 7, 9, 8]
NUM_REQUESTS = 500
CONCURRENCY = 32


async def one_request(services: Services, chance: random.Random) -> str:
    """Runs a request that ends in one of several ways; says in which."""
    prompt = [chance.randrange(64) for _ in range(chance.choice([1, 4, 5, 16, 30]))]
    kind = chance.choice(["cancel", "cancel", "deadline", "finish", "finish", "finish"])
    timeout_s = chance.choice([0.001, 0.01, 0.03]) if kind == "deadline" else None
    stream = services.client.generate(
        prompt,
        temperature=chance.choice([0.0, 1.0]),
        max_tokens=chance.randrange(1, 12) if kind == "finish" else 64,
        num_speculative_tokens=chance.randrange(0, 9),
        drafter=chance.choice(["ngram", "model"]),
        timeout_s=timeout_s,
    )
    # Before the call reaches the service, before the first token, or between tokens.
    num_chunks, delay_s = chance.choice([(0, 0.0), (0, 0.02), (1, 0.0), (3, 0.0), (2, 0.01)])
    try:
        if kind == "cancel":
            for _ in range(num_chunks):
                await anext(aiter(stream))
            await asyncio.sleep(delay_s)
            stream.cancel()
        await stream.collect()
    except GenerationError as error:
        return error.code
    return "FINISHED"


async def test_load_with_cancels_and_deadlines_leaves_nothing_behind(tmp_path: Path) -> None:
    target = save_random_llama(tmp_path / "target")
    draft = save_noisy_copy(target, tmp_path / "draft", noise=0.03)
    # Small pools, so that preemption is part of it.
    settings = {"block_size": 4, "num_blocks": 200, "max_prefill_tokens": 24, "num_threads": 1}
    async with running(
        target,
        tmp_path / "traces",
        draft_model=draft,
        drafter="model",
        target=settings,
        draft=settings,
    ) as services:
        expected = await greedy_ids(services.client, CANARY, max_tokens=12)
        await becomes_idle(services)
        idle_load = (await services.client.model_info()).load
        num_sessions = (
            services.target.engine.num_sessions,
            services.draft.engine.num_sessions,
        )
        chance = random.Random(0)
        ends: Counter[str] = Counter()
        turns = asyncio.Semaphore(CONCURRENCY)

        async def take_turn(i: int) -> None:
            async with turns:
                if i % 100 == 50:
                    assert await greedy_ids(services.client, CANARY, max_tokens=12) == expected
                ends[await one_request(services, random.Random(chance.random()))] += 1

        await asyncio.gather(*[take_turn(i) for i in range(NUM_REQUESTS)])
        assert set(ends) == {"FINISHED", "CANCELLED", "DEADLINE_EXCEEDED"}, ends
        assert ends["CANCELLED"] > NUM_REQUESTS / 5
        assert ends["DEADLINE_EXCEEDED"] > NUM_REQUESTS / 20

        await becomes_idle(services)
        assert num_sessions == (
            services.target.engine.num_sessions,
            services.draft.engine.num_sessions,
        )
        assert services.orchestrator._servicer._live_request_ids == set()
        load = (await services.client.model_info()).load
        for gauge in (
            "num_requests_running",
            "num_active_rpcs",
            "num_free_blocks",
            "num_blocks",
            "num_target_sequences",
            "num_draft_sequences",
            "num_free_draft_blocks",
        ):
            assert getattr(load, gauge) == getattr(idle_load, gauge), gauge
        assert load.num_requests_running == load.num_active_rpcs == 0
        assert load.num_free_blocks == load.num_blocks == 200
        assert load.num_free_draft_blocks == 200
        assert load.num_redraw_mismatches == 0
        assert await greedy_ids(services.client, CANARY, max_tokens=12) == expected
        # No drafting was lost on the way either.
        result = await generate(
            services.client, CANARY, temperature=0.0, max_tokens=24, drafter="model"
        )
        assert result.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("drafter", ["model", "ngram"])
async def test_a_client_that_disconnects_is_forgotten(tmp_path: Path, drafter: str) -> None:
    target = save_random_llama(tmp_path / "target", max_position_embeddings=4096)
    settings = {"num_threads": 1}
    async with running(
        target,
        tmp_path / "traces",
        draft_model=target,
        drafter=drafter,
        target=settings,
        draft=settings,
    ) as services:
        expected = await greedy_ids(services.client, CANARY, max_tokens=12)
        client = AsyncClient(services.orchestrator.address)
        streams = [client.generate(CANARY, temperature=0.0) for _ in range(4)]
        for stream in streams:
            for _ in range(3):
                await anext(aiter(stream))
        assert services.target.engine.num_sequences == 4
        await client.close()
        for stream in streams:
            with contextlib.suppress(GenerationError, asyncio.CancelledError):
                await stream.collect()
        await becomes_idle(services)
        assert await greedy_ids(services.client, CANARY, max_tokens=12) == expected


async def test_an_orchestrator_that_leaves_takes_its_sequences_with_it(tmp_path: Path) -> None:
    target = save_random_llama(tmp_path / "target", max_position_embeddings=4096)
    settings = {"num_threads": 1}
    async with running(
        target,
        tmp_path / "traces",
        draft_model=target,
        drafter="model",
        target=settings,
        draft=settings,
        orchestrator={"drain_grace_ms": 0},
    ) as services:
        stream = services.client.generate(CANARY, temperature=0.0)
        await anext(aiter(stream))
        await services.orchestrator.stop()
        with pytest.raises(GenerationError):
            await stream.collect()
        await becomes_idle(services)
        engines = (services.target.engine, services.draft.engine)
        await eventually(lambda: not any(engine.num_sessions for engine in engines), "sessions")
