"""What goes wrong beside a request costs it speed at most; what goes wrong in it, it alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from orchestrator.service import OrchestratorService
from orchestrator.settings import OrchestratorSettings
from specdec.client import AsyncClient, GenerationError
from specdec.v1 import draft_pb2, draft_pb2_grpc, tensor_pb2
from tests.integration.checks import becomes_idle, error_of, eventually, generate, greedy_ids
from tests.services import Services, running
from tests.toy_models import save_bigram, save_random_llama

PROMPT = [4, 5, 6, 4, 5, 6, 4]
THREADS = {"num_threads": 1}


# A draft service that stops.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_draft_service_that_stops_costs_only_speed(
    tmp_path: Path, temperature: float
) -> None:
    target = save_random_llama(tmp_path / "target", max_position_embeddings=1024)
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_tokens": 160}
    async with running(
        target,
        tmp_path / "traces",
        draft_model=target,
        drafter="model",
        target=THREADS,
        draft=THREADS | {"drain_grace_ms": 0},
    ) as services:
        expected = await generate(services.client, PROMPT, speculation=False, **options)
        streams = [services.client.generate(PROMPT, **options) for _ in range(3)]
        for stream in streams:
            for _ in range(5):
                await anext(aiter(stream))
        await services.draft.stop()
        results = await asyncio.gather(*[stream.collect() for stream in streams])
        for result in results:
            assert result.token_ids == expected.token_ids
            assert result.speculation.num_accepted_tokens > 0
            # Long before the end nothing was drafted any more.
            assert [token.source for token in result.tokens[-20:]] == ["target"] * 20
        later = await generate(services.client, PROMPT, **options)
        assert later.token_ids == expected.token_ids
        assert later.speculation.num_draft_tokens == 0
        info = await services.client.model_info()
        assert not any(drafter.available for drafter in info.drafters)
        assert info.load.num_draft_fallbacks > 0


# Draft services that never make sense.


class FakeDrafter(draft_pb2_grpc.DraftServiceServicer):
    """Answers each item as a test wants, or not at all."""

    def __init__(self, answer: Callable[[draft_pb2.ProposeItem], draft_pb2.DraftChunk | None]):
        self.answer = answer
        self.num_items = 0

    async def GetDraftInfo(self, request: Any, context: Any) -> draft_pb2.GetDraftInfoResponse:
        return draft_pb2.GetDraftInfoResponse(drafters=["model", "ngram"])

    async def Propose(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        async for request in request_iterator:
            for item in request.items:
                self.num_items += 1
                chunk = self.answer(item)
                if chunk is not None:
                    chunk.sequence_id, chunk.epoch = item.sequence_id, item.epoch
                    chunk.round_index, chunk.base_length = item.round_index, item.base_length
                    chunk.status = chunk.status or draft_pb2.PROPOSE_STATUS_OK
                    yield draft_pb2.ProposeResponse(chunks=[chunk])


@contextlib.asynccontextmanager
async def with_fake_drafter(
    target: Path, folder: Path, fake: FakeDrafter, deadline_ms: int = 20
) -> AsyncIterator[tuple[Services, AsyncClient]]:
    """A target, an orchestrator paired with the fake, and a client of it."""
    async with running(target, folder / "traces", drafter="none", target=THREADS) as services:
        server = grpc.aio.server()
        draft_pb2_grpc.add_DraftServiceServicer_to_server(fake, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        settings = OrchestratorSettings(
            target=services.target.address,
            draft=f"127.0.0.1:{port}",
            model=str(target),
            port=0,
            trace_dir=folder / "traces",
            draft_deadline_ms=deadline_ms,
            draft_limits={1024: 64},  # drafts whatever the load
            drain_grace_ms=0,
        )
        async with (
            OrchestratorService(settings) as orchestrator,
            AsyncClient(orchestrator.address) as client,
        ):
            yield services, client
        await server.stop(0)
        await becomes_idle(services)


def sparse(token_ids: list[int], probs: list[float]) -> tensor_pb2.DraftDistribution:
    return tensor_pb2.DraftDistribution(
        form=tensor_pb2.DISTRIBUTION_FORM_SPARSE,
        token_ids=np.array(token_ids, "<u4").tobytes(),
        probs=np.array(probs, "<f4").tobytes(),
    )


def chunk(token_ids: list[int], *, final: bool = True, **fields: Any) -> draft_pb2.DraftChunk:
    return draft_pb2.DraftChunk(token_ids=token_ids, final=final, **fields)


NAN, INF = float("nan"), float("inf")
GARBAGE: dict[str, Callable[[draft_pb2.ProposeItem], draft_pb2.DraftChunk]] = {
    "ids out of range": lambda item: chunk([1, 64]),
    "ids far out of range": lambda item: chunk([2**32 - 1]),
    "NaN": lambda item: chunk([1], distributions=[sparse([1, 2], [NAN, 0.5])]),
    "infinite": lambda item: chunk([1], distributions=[sparse([1, 2], [INF, 0.5])]),
    "negative": lambda item: chunk([1], distributions=[sparse([1, 2], [1.5, -0.5])]),
    "all zero": lambda item: chunk([1], distributions=[sparse([1, 2], [0.0, 0.0])]),
    "sum of two": lambda item: chunk([1], distributions=[sparse([1, 2], [1.0, 1.0])]),
    "no support": lambda item: chunk([1], distributions=[sparse([], [])]),
    "id twice": lambda item: chunk([1], distributions=[sparse([1, 1], [0.5, 0.5])]),
    "support out of range": lambda item: chunk([1], distributions=[sparse([1, 64], [0.5, 0.5])]),
    "lengths differ": lambda item: chunk([1], distributions=[sparse([1, 2, 3], [0.5, 0.5])]),
    "no form": lambda item: chunk([1], distributions=[tensor_pb2.DraftDistribution()]),
    "half an element": lambda item: chunk(
        [1],
        distributions=[
            tensor_pb2.DraftDistribution(form=tensor_pb2.DISTRIBUTION_FORM_DENSE, probs=b"12345")
        ],
    ),
    # A well-formed q from which the token was not drawn, or cannot be.
    "not drawn from q": lambda item: chunk([1], distributions=[sparse([1, 2], [0.5, 0.5])]),
    "q of zero": lambda item: chunk([1], distributions=[sparse([2], [1.0])]),
    "always the same": lambda item: chunk([7] * item.num_speculative_tokens),
    "one q too few": lambda item: chunk([1, 2], distributions=[sparse([1], [1.0])]),
    "one q too many": lambda item: chunk([1], distributions=[sparse([1], [1.0])] * 2),
    "wrong start": lambda item: chunk([1], start_index=3),
    "too many": lambda item: chunk([1] * (item.num_speculative_tokens + 5)),
    "far too many": lambda item: chunk([1] * 5000),
    "a tree": lambda item: chunk([1, 2], parent_indices=[-1, -1]),
    "unknown": lambda item: chunk([], status=draft_pb2.PROPOSE_STATUS_UNKNOWN_SEQUENCE),
    "mismatch with tokens": lambda item: chunk([3], status=draft_pb2.PROPOSE_STATUS_MISMATCH),
    "failed": lambda item: chunk([], status=draft_pb2.PROPOSE_STATUS_FAILED),
    "exhausted": lambda item: chunk([], status=draft_pb2.PROPOSE_STATUS_EXHAUSTED),
    "invalid": lambda item: chunk([], status=draft_pb2.PROPOSE_STATUS_INVALID, detail="no"),
    "unheard-of status": lambda item: chunk([1], status=99),
    "never final": lambda item: chunk([1], final=False),
}


async def test_a_drafter_that_talks_nonsense_changes_no_output(tmp_path: Path) -> None:
    target = save_random_llama(tmp_path / "target")
    fake = FakeDrafter(lambda item: None)
    async with with_fake_drafter(target, tmp_path, fake) as (services, client):
        expected = await greedy_ids(client, PROMPT, max_tokens=12, speculation=False)
        for name, answer in GARBAGE.items():
            fake.answer, fake.num_items = answer, 0
            greedy, *sampled = await asyncio.gather(
                generate(client, PROMPT, temperature=0.0, max_tokens=12),
                *[generate(client, PROMPT, max_tokens=12) for _ in range(2)],
            )
            assert fake.num_items > 0, name
            assert greedy.token_ids == expected, name
            for result in sampled:
                assert len(result.token_ids) == 12, name
                assert max(result.token_ids) < 64, name
        assert services.target.engine.stats.num_redraw_mismatches > 0


async def test_a_seeded_output_is_the_targets_own_draws_whatever_is_sent(tmp_path: Path) -> None:
    """In coupled mode a proposal has no distributions; those sent all the same decide nothing."""
    target = save_random_llama(tmp_path / "target")
    fake = FakeDrafter(lambda item: None)
    changed = []
    async with with_fake_drafter(target, tmp_path, fake) as (_, client):
        expected = await generate(client, PROMPT, max_tokens=16, speculation=False, seed=5)
        for name, answer in GARBAGE.items():
            fake.answer = answer
            result = await generate(client, PROMPT, max_tokens=16, seed=5)
            if result.token_ids != expected.token_ids:
                changed.append(name)
    assert not changed


async def test_a_drafter_that_never_answers_is_not_waited_for(tmp_path: Path) -> None:
    target = save_random_llama(tmp_path / "target")
    fake = FakeDrafter(lambda item: None)
    async with with_fake_drafter(target, tmp_path, fake, deadline_ms=50) as (_, client):
        expected = await greedy_ids(client, PROMPT, max_tokens=40, speculation=False)
        before = (await client.model_info()).load.num_draft_fallbacks
        started_s = time.monotonic()
        result = await generate(client, PROMPT, temperature=0.0, max_tokens=40)
        # It is waited for once, not in every round.
        assert time.monotonic() - started_s < 40 * 0.05
        assert result.token_ids == expected
        assert result.speculation.num_draft_tokens == 0
        assert fake.num_items > 0
        assert (await client.model_info()).load.num_draft_fallbacks - before >= 30


# A target that stops.


async def test_a_target_that_stops_ends_requests_as_unavailable(tmp_path: Path) -> None:
    target = save_random_llama(tmp_path / "target", max_position_embeddings=4096)
    async with running(
        target,
        tmp_path / "traces",
        target=THREADS | {"drain_grace_ms": 0},
        draft=THREADS,
    ) as services:
        streams = [services.client.generate(PROMPT, temperature=0.0) for _ in range(3)]
        for stream in streams:
            await anext(aiter(stream))
        started_s = time.monotonic()
        stopping = asyncio.create_task(services.target.stop())
        for stream in streams:
            with pytest.raises(GenerationError) as raised:
                await stream.collect()
            assert raised.value.code == "UNAVAILABLE"
            assert raised.value.reason in ("TARGET_LOST", "NO_TARGET")
        assert time.monotonic() - started_s < 3
        error = await error_of(services.client, PROMPT, max_tokens=3)
        assert error.code == "UNAVAILABLE"
        await stopping
        draft = services.draft
        await eventually(lambda: draft.engine.num_sequences == 0, "draft sequences")
        assert services.orchestrator.active_rpcs.num_active == 0


# Logits that are not finite.

POISON = 63


def save_poisoned(folder: Path) -> Path:
    """Saves a model whose embedding of one token is NaN."""
    save_random_llama(folder, max_position_embeddings=1024)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
        model.lm_head.weight[POISON] = 0  # hardly ever emitted
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("drafter", ["ngram", "model"])
async def test_logits_that_are_not_finite_end_their_request_alone(
    tmp_path: Path, drafter: str
) -> None:
    model = save_poisoned(tmp_path / "model")
    # Few blocks, so that those of a poisoned request are used again.
    settings = THREADS | {"block_size": 4, "num_blocks": 64, "max_prefill_tokens": 8}
    async with running(
        model,
        tmp_path / "traces",
        draft_model=model,
        drafter=drafter,
        target=settings,
        draft=settings,
    ) as services:
        client = services.client
        expected = await greedy_ids(client, PROMPT, max_tokens=20)
        for poisoned in ([1, POISON, 2], [POISON], [*PROMPT, POISON], [1, POISON, *range(30)]):
            error, *ids = await asyncio.gather(
                error_of(client, poisoned, max_tokens=5),
                *[greedy_ids(client, PROMPT, max_tokens=20) for _ in range(3)],
            )
            assert (error.code, error.reason) == ("INTERNAL", "NON_FINITE_LOGITS")
            assert set(ids) == {expected}
            assert await greedy_ids(client, PROMPT, max_tokens=20) == expected
        await becomes_idle(services)


@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_a_poisoned_prefill_that_is_cut_short_poisons_nobody(
    tmp_path: Path, end: str
) -> None:
    """The KV of a prompt that never came to its logits holds NaN all the same."""
    model = save_poisoned(tmp_path / "model")
    settings = THREADS | {"block_size": 16, "num_blocks": 64, "max_prefill_tokens": 8}
    async with running(model, tmp_path / "traces", drafter="none", target=settings) as services:
        client = services.client
        expected = await greedy_ids(client, PROMPT, max_tokens=20)
        poisoned = client.generate(
            [POISON] * 1000, max_tokens=5, timeout_s=0.06 if end == "deadline" else None
        )
        if end == "cancel":
            start = asyncio.create_task(poisoned.collect())
            engine = services.target.engine
            await eventually(lambda: engine.num_free_blocks < 60, "prefill in progress")
            poisoned.cancel()
            with pytest.raises(GenerationError):
                await start
        else:
            with pytest.raises(GenerationError, match="DEADLINE_EXCEEDED"):
                await poisoned.collect()
        await becomes_idle(services)
        assert await greedy_ids(client, PROMPT, max_tokens=20) == expected


async def test_a_draft_whose_logits_are_not_finite_harms_nothing(tmp_path: Path) -> None:
    """The target must judge the drafts before one that it would reject."""
    vocab_size = 16
    to_next = np.roll(np.eye(vocab_size), 1, axis=1)
    target = save_bigram(tmp_path / "target", to_next)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[15] = torch.nan
    model.save_pretrained(target)
    # Proposes 15 after 3, where the target goes on with 4.
    wrong = to_next.copy()
    wrong[3] = np.eye(vocab_size)[15]
    draft = save_bigram(tmp_path / "draft", wrong)
    async with running(
        target, tmp_path / "traces", draft_model=draft, drafter="model", target=THREADS,
        draft=THREADS,
    ) as services:  # fmt: skip
        for k in (0, 1, 2, 4, 8):
            ids = await greedy_ids(services.client, [0], max_tokens=9, num_speculative_tokens=k)
            assert ids == tuple(range(1, 10)), k
