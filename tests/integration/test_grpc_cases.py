"""Calls that are cancelled, slow, many or too large: the others notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specdec.client import GenerationError
from specdec.rpc.channel import channel_options, open_channel
from specdec.rpc.interceptors import tracing_client_interceptors
from specdec.v1 import orchestrator_pb2 as pb
from specdec.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from tests.integration.checks import becomes_idle, eventually, generate, greedy_ids
from tests.services import Services, running
from tests.toy_models import save_noisy_copy, save_random_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB_SIZE = 64
CONTEXT_SIZE = 4096
MAX_MESSAGE_BYTES = 2**20
SERVING = health_pb2.HealthCheckResponse.SERVING
CANARY = [9, 8, 7, 9, 8]
UNSCRAPED: dict[str, Any] = {"metrics_port": None}
# Tells a hang from an answer on a machine that is busy with other things.
SOON_S = 20.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = save_random_llama(folder / "target", max_position_embeddings=CONTEXT_SIZE)
    return target, save_noisy_copy(target, folder / "draft", noise=0.03)


@contextlib.asynccontextmanager
async def deployment(
    models: tuple[Path, Path], trace_dir: Path, **orchestrator: Any
) -> AsyncIterator[Services]:
    pool = UNSCRAPED | {"num_blocks": 400, "max_prefill_tokens": 32}
    async with running(
        models[0],
        trace_dir,
        draft_model=models[1],
        drafter="model",
        target=pool,
        draft=pool,
        orchestrator=UNSCRAPED | orchestrator,
    ) as services:
        yield services


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Services]:
    async with deployment(models, tmp_path_factory.mktemp("traces")) as services:
        yield services
        await becomes_idle(services)


def long_request(first_token: int = 1) -> pb.GenerateRequest:
    """Text to the end of the context."""
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[first_token % VOCAB_SIZE]),
        sampling=pb.SamplingParams(temperature=0.0),
    )


@contextlib.asynccontextmanager
async def small_window_channel(services: Services) -> AsyncIterator[grpc.aio.Channel]:
    """A channel that takes a kilobyte per stream ahead of its reader; the default is megabytes."""
    options = (
        *channel_options(MAX_MESSAGE_BYTES),
        ("grpc.http2.lookahead_bytes", 1024),
        ("grpc.http2.bdp_probe", 0),
    )
    async with grpc.aio.insecure_channel(services.orchestrator.address, options=options) as channel:
        yield channel


async def start(call: Any) -> grpc.StatusCode | None:
    """Waits for a stream's first response; returns the status of one that ends before."""
    try:
        return None if await call.read() is not grpc.aio.EOF else await call.code()
    except grpc.aio.AioRpcError as error:
        return error.code()


def has_spans(trace_dir: Path) -> bool:
    """Whether any span was written."""
    return any(path.stat().st_size for path in trace_dir.rglob("*") if path.is_file())


async def check_probes(channel: grpc.aio.Channel) -> None:
    """Health and reflection answer."""
    health = health_pb2_grpc.HealthStub(channel)
    assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=SOON_S)).status == SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection.ServerReflectionInfo(iter([request]), timeout=SOON_S)
    listed = (await call.read()).list_services_response.service
    assert "specdec.v1.OrchestratorService" in {service.name for service in listed}
    call.cancel()


# Calls that are cancelled.


async def test_a_hundred_calls_cancelled_after_three_tokens(services: Services) -> None:
    expected = await greedy_ids(services.client, CANARY, max_tokens=12)

    async def cancel_after_three(first_token: int) -> None:
        stream = services.client.generate([first_token], temperature=0.0)
        num_tokens = 0
        with contextlib.suppress(GenerationError):
            async for chunk in stream:
                num_tokens += len(chunk.tokens)
                if num_tokens >= 3:
                    stream.cancel()
            raise AssertionError("the call was not cancelled")
        assert 3 <= num_tokens < CONTEXT_SIZE - 1

    for _ in range(5):
        await asyncio.gather(*[cancel_after_three(i) for i in range(20)])
    await becomes_idle(services)
    assert await greedy_ids(services.client, CANARY, max_tokens=12) == expected


@pytest.mark.parametrize("by", ["call", "task"])
@pytest.mark.parametrize("is_traced", [True, False])
async def test_cancelling_stops_the_target_with_tracing_on_and_off(
    models: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_traced: bool,
    by: str,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on" if is_traced else "always_off")
    async with deployment(models, tmp_path) as services:
        interceptors = (
            tracing_client_interceptors(services.orchestrator.tracing) if is_traced else []
        )
        async with open_channel(
            services.orchestrator.address, MAX_MESSAGE_BYTES, interceptors
        ) as channel:
            call = OrchestratorServiceStub(channel).Generate(long_request())
            is_streaming = asyncio.Event()

            async def read() -> None:
                async for _ in call:
                    is_streaming.set()

            reader = asyncio.create_task(read())
            await asyncio.wait_for(is_streaming.wait(), SOON_S)
            steps_before = services.target.engine.stats.num_steps
            if by == "task":
                reader.cancel()
            else:
                call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await becomes_idle(services)
            # To the end of the context it would have been hundreds of steps.
            steps_after = services.target.engine.stats.num_steps
            assert steps_after - steps_before < 200
            await asyncio.sleep(0.1)
            assert services.target.engine.stats.num_steps == steps_after
        assert services.orchestrator.tracing.num_dropped_spans == 0
    assert has_spans(tmp_path) == is_traced


async def test_calls_cancelled_at_any_moment_harm_nobody(
    services: Services, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts in the middle of their chunks, drafts on their way, steps in progress."""
    expected = await greedy_ids(services.client, CANARY, max_tokens=12)
    turns = asyncio.Semaphore(24)
    ends: list[str] = []

    async def cancel_sometime(i: int) -> None:
        chance = random.Random(i)
        async with turns:
            stream = services.client.generate(
                [chance.randrange(VOCAB_SIZE) for _ in range(chance.choice([1, 5, 40, 300]))],
                temperature=chance.choice([0.0, 1.0]),
                max_tokens=200,
                drafter=chance.choice(["ngram", "model"]),
                num_speculative_tokens=chance.randrange(9),
            )
            cancelling = asyncio.get_running_loop().call_later(
                chance.uniform(0, 0.15), stream.cancel
            )
            try:
                await stream.collect()
                ends.append("FINISHED")
            except GenerationError as error:
                ends.append(error.code)
            cancelling.cancel()

    async def ask_canaries() -> int:
        num_asked = 0
        while len(ends) < 300:
            assert await greedy_ids(services.client, CANARY, max_tokens=12) == expected
            num_asked += 1
        return num_asked

    num_canaries, *_ = await asyncio.gather(
        ask_canaries(), *[cancel_sometime(i) for i in range(300)]
    )
    assert num_canaries > 0
    assert set(ends) <= {"CANCELLED", "FINISHED"}
    assert ends.count("CANCELLED") > 150
    await becomes_idle(services)
    assert await greedy_ids(services.client, CANARY, max_tokens=12) == expected
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# Many streams, slow readers.


async def test_many_slow_streams_on_one_channel_all_start(services: Services) -> None:
    async with small_window_channel(services) as channel:
        stub = OrchestratorServiceStub(channel)
        calls = [stub.Generate(long_request(i)) for i in range(150)]
        # Queued or begun: health does not wait in their queue.
        await check_probes(channel)
        async with asyncio.timeout(3 * SOON_S):
            assert await asyncio.gather(*[start(call) for call in calls]) == [None] * 150
        assert services.orchestrator.active_rpcs.num_active == 150
        await check_probes(channel)
        for call in calls:
            call.cancel()
    await becomes_idle(services)


async def test_streams_beyond_the_limit_are_refused_not_queued(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    async with (
        deployment(models, tmp_path, max_requests=100) as services,
        small_window_channel(services) as channel,
    ):
        stub = OrchestratorServiceStub(channel)
        calls = [stub.Generate(long_request(i)) for i in range(150)]
        async with asyncio.timeout(3 * SOON_S):
            ends = await asyncio.gather(*[start(call) for call in calls])
        assert ends.count(None) == 100
        assert ends.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 50
        for call in calls:
            call.cancel()
        await becomes_idle(services)


async def test_probes_answer_beside_slow_streams(services: Services) -> None:
    async with small_window_channel(services) as channel:
        stub = OrchestratorServiceStub(channel)
        calls = [stub.Generate(long_request(i)) for i in range(64)]
        async with asyncio.timeout(SOON_S):
            assert await asyncio.gather(*[start(call) for call in calls]) == [None] * 64
        await check_probes(channel)
        async with open_channel(services.orchestrator.address, MAX_MESSAGE_BYTES) as another:
            await check_probes(another)
        assert services.orchestrator.active_rpcs.num_active == 64
        for call in calls:
            call.cancel()
    await becomes_idle(services)


async def test_a_reader_that_does_not_read_is_not_computed_for(services: Services) -> None:
    """Beyond what its channel takes, and a response or two, nothing is made in advance."""
    prompts = [[i, i + 1, i + 2] for i in range(20)]
    alone = [await greedy_ids(services.client, prompt, max_tokens=10) for prompt in prompts]
    expected = await greedy_ids(services.client, [1], max_tokens=200)
    target = services.target.engine
    async with small_window_channel(services) as channel:
        request = long_request()
        request.sampling.max_tokens = 200
        request.speculation.enabled = False
        steps_before = target.stats.num_steps
        call = OrchestratorServiceStub(channel).Generate(request)
        assert await start(call) is None
        num_steps = -1
        while num_steps != target.stats.num_steps:
            num_steps = target.stats.num_steps
            await asyncio.sleep(0.2)
        # A response of one token is some 60 bytes, so that its channel takes about 20.
        assert num_steps - steps_before < 100
        assert target.num_sequences == 1

        together = await asyncio.gather(
            *[greedy_ids(services.client, prompt, max_tokens=10) for prompt in prompts]
        )
        assert together == alone

        # It reads on, and has missed nothing.
        ids = list(expected[:1])
        async with asyncio.timeout(SOON_S):
            while (response := await call.read()) is not grpc.aio.EOF:
                ids += [token.id for token in response.tokens]
    assert tuple(ids) == expected
    await becomes_idle(services)


# Large messages.

WIDE_VOCAB_SIZE = 151_936
WIDE_DISTRIBUTION_BYTES = 4 * WIDE_VOCAB_SIZE
WIDE_MESSAGE_BYTES = 8 * 2**20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wide_services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    folder = tmp_path_factory.mktemp("wide")
    model = save_random_llama(
        folder / "model",
        vocab_size=WIDE_VOCAB_SIZE,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
    )
    async with running(
        model,
        folder / "traces",
        draft_model=model,
        drafter="model",
        target=UNSCRAPED,
        draft=UNSCRAPED,
        orchestrator=UNSCRAPED | {"draft_form": "dense", "max_message_bytes": WIDE_MESSAGE_BYTES},
    ) as services:
        yield services
        await becomes_idle(services)


async def test_health_answers_while_large_drafts_flow(wide_services: Services) -> None:
    services = wide_services
    options: dict[str, Any] = {
        "temperature": 1.0,
        "acceptance": "rejection",
        "num_speculative_tokens": 4,
        "ignore_eos": True,
    }
    streams = [services.client.generate([1, i], **options) for i in range(3)]
    readers = [asyncio.create_task(stream.collect()) for stream in streams]
    assert services.draft is not None
    draft_engine = services.draft.engine
    async with contextlib.AsyncExitStack() as stack:
        stubs = []
        for service in (services.target, services.draft, services.orchestrator):
            channel = open_channel(service.address, MAX_MESSAGE_BYTES)
            stubs.append(health_pb2_grpc.HealthStub(await stack.enter_async_context(channel)))
        await eventually(lambda: draft_engine.num_steps > 8, "drafts flow", timeout_s=SOON_S)
        steps_before = draft_engine.num_steps
        waits_s = []
        while draft_engine.num_steps < steps_before + 30 or len(waits_s) < 100:
            for stub in stubs:
                started_s = time.monotonic()
                response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=SOON_S)
                waits_s.append(time.monotonic() - started_s)
                assert response.status == SERVING
            assert not any(reader.done() for reader in readers)
        waits_s.sort()
        assert waits_s[len(waits_s) // 2] < 0.2
        assert waits_s[-1] < 5
    for stream in streams:
        stream.cancel()
    for reader in readers:
        with pytest.raises(GenerationError, match="CANCELLED"):
            await reader
    await becomes_idle(services)


async def test_a_proposal_too_large_for_a_message_is_cut_and_harms_nobody(
    wide_services: Services,
) -> None:
    """A message over the limit would end the stream, and every request on it."""
    services = wide_services
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "speculation": False}
    expected = (await generate(services.client, [3, 4], **options)).token_ids
    num_drafts = 16
    assert num_drafts * WIDE_DISTRIBUTION_BYTES > WIDE_MESSAGE_BYTES
    large = generate(
        services.client,
        [1, 2],
        temperature=1.0,
        acceptance="rejection",
        num_speculative_tokens=num_drafts,
        max_tokens=40,
        ignore_eos=True,
    )
    others = (generate(services.client, [3, 4], **options) for _ in range(4))
    result, *beside = await asyncio.gather(large, *others)
    assert len(result.token_ids) == 40
    # Drafts went along as far as they fit, and no further.
    most = WIDE_MESSAGE_BYTES // WIDE_DISTRIBUTION_BYTES
    assert 0 < len(result.speculation.num_accepted_tokens_per_position) <= most
    assert [other.token_ids for other in beside] == [expected] * 4
    await becomes_idle(services)
