"""What every service shows around its work: health, reflection, metadata, every RPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from transformers import AutoModelForCausalLM

from specdec.rpc.channel import open_channel
from specdec.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)
from tests.integration.checks import becomes_idle, eventually, generate
from tests.services import Services, running
from tests.toy_models import save_bigram, save_random_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_MESSAGE_BYTES = 2**20
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICES = {
    "target": "specdec.v1.TargetService",
    "draft": "specdec.v1.DraftService",
    "orchestrator": "specdec.v1.OrchestratorService",
}
THREADS = {"num_threads": 1}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    folder = tmp_path_factory.mktemp("surface")
    model = save_random_llama(folder / "model")
    async with running(
        model,
        folder / "traces",
        draft_model=model,
        drafter="model",
        target=THREADS,
        draft=THREADS,
    ) as services:
        yield services
        await becomes_idle(services)


@contextlib.asynccontextmanager
async def channel_to(services: Services, name: str) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(getattr(services, name).address, MAX_MESSAGE_BYTES) as channel:
        yield channel


@pytest.mark.parametrize("name", SERVICES)
async def test_health_of_every_service(services: Services, name: str) -> None:
    async with channel_to(services, name) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for asked in ("", SERVICES[name]):
            request = health_pb2.HealthCheckRequest(service=asked)
            assert (await stub.Check(request)).status == SERVING
            watch = stub.Watch(request)
            assert (await watch.read()).status == SERVING
            watch.cancel()
        for unknown in ("specdec.v1.Nobody", "specdec.v1"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Check(health_pb2.HealthCheckRequest(service=unknown))
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", SERVICES)
async def test_reflection_lists_the_service(services: Services, name: str) -> None:
    async with channel_to(services, name) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICES[name]),
        ]
        call = stub.ServerReflectionInfo(iter(requests))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        assert listed >= {SERVICES[name], "grpc.health.v1.Health"}
        assert (await call.read()).file_descriptor_response.file_descriptor_proto


async def test_every_service_tells_its_facts(services: Services) -> None:
    async with channel_to(services, "target") as channel:
        target = await target_pb2_grpc.TargetServiceStub(channel).GetTargetInfo(
            target_pb2.GetTargetInfoRequest()
        )
    async with channel_to(services, "draft") as channel:
        draft = await draft_pb2_grpc.DraftServiceStub(channel).GetDraftInfo(
            draft_pb2.GetDraftInfoRequest()
        )
    info = await services.client.model_info()
    assert (target.vocab_size, target.context_size) == (64, 512)
    assert (target.num_blocks, target.num_free_blocks, target.block_size) == (512, 512, 16)
    assert (target.num_sessions, target.num_sequences, target.dtype) == (1, 0, "float32")
    assert target.fingerprint
    assert list(draft.drafters) == ["model", "ngram"]
    assert draft.token_table_digest == target.token_table_digest
    assert (draft.num_sessions, draft.num_sequences) == (1, 0)
    assert draft.num_blocks == draft.num_free_blocks == 512
    assert (info.vocab_size, info.context_size, info.dtype) == (64, 512, "float32")
    assert info.target_model == target.model
    assert [(drafter.name, drafter.available) for drafter in info.drafters] == [
        ("model", True),
        ("ngram", True),
    ]
    assert info.default_drafter == "model"
    assert all(drafter.acceptances == ("rejection", "coupled") for drafter in info.drafters)
    assert info.load.num_free_blocks == info.load.num_blocks == 512


@pytest.mark.parametrize("name", ["target", "draft"])
async def test_a_stream_takes_a_heartbeat_and_ends_with_its_client(
    services: Services, name: str
) -> None:
    engine = getattr(services, name).engine
    num_sessions = engine.num_sessions
    async with channel_to(services, name) as channel:
        if name == "target":
            call = target_pb2_grpc.TargetServiceStub(channel).Verify()
            heartbeat: Any = target_pb2.VerifyRequest()
        else:
            call = draft_pb2_grpc.DraftServiceStub(channel).Propose()
            heartbeat = draft_pb2.ProposeRequest()
        await call.write(heartbeat)
        await eventually(lambda: engine.num_sessions == num_sessions + 1, "the session opens")
        await call.write(heartbeat)
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
    await eventually(lambda: engine.num_sessions == num_sessions, "the session closes")
    # The orchestrator's own session is not touched.
    result = await generate(services.client, [1], temperature=0.0, max_tokens=8)
    assert result.speculation.num_draft_tokens > 0


async def test_strange_items_are_answered_each_by_itself(services: Services) -> None:
    async with channel_to(services, "target") as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).Verify()
        request = target_pb2.VerifyRequest(
            opens=[
                target_pb2.OpenSequence(sequence_id=1, epoch=1),
                target_pb2.OpenSequence(sequence_id=2, epoch=1, token_ids=[64]),
                target_pb2.OpenSequence(sequence_id=3, epoch=1, token_ids=[1, 2]),
            ],
            items=[
                target_pb2.VerifyItem(sequence_id=i, epoch=1, base_length=2) for i in (1, 2, 3, 4)
            ],
            releases=[target_pb2.ReleaseSequence(sequence_id=9, epoch=1)],
        )
        await call.write(request)
        statuses = {}
        while len(statuses) < 4:
            for result in (await call.read()).results:
                statuses[result.sequence_id] = result.status
        assert statuses == {
            1: target_pb2.VERIFY_STATUS_INVALID,
            2: target_pb2.VERIFY_STATUS_INVALID,
            3: target_pb2.VERIFY_STATUS_MISMATCH,  # no digest
            4: target_pb2.VERIFY_STATUS_UNKNOWN_SEQUENCE,
        }
        call.cancel()


async def test_the_trace_id_comes_first(services: Services) -> None:
    async with channel_to(services, "orchestrator") as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        request = orchestrator_pb2.GenerateRequest(
            token_ids=orchestrator_pb2.TokenIds(ids=[1]),
            sampling=orchestrator_pb2.SamplingParams(max_tokens=3),
        )
        call = stub.Generate(
            request, metadata=(("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),)
        )
        assert dict(await call.initial_metadata())["specdec-trace-id"] == trace_id
        responses = [response async for response in call]
        assert responses[-1].trace_id == trace_id
        assert [response.HasField("finish") for response in responses] == (
            [False] * (len(responses) - 1) + [True]
        )
        assert {response.request_id for response in responses} == {responses[0].request_id}
        # Also when the call fails, and without a context of the client's own.
        failing = stub.Generate(orchestrator_pb2.GenerateRequest())
        assert len(dict(await failing.initial_metadata())["specdec-trace-id"]) == 32
        assert await failing.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_error_after_tokens_tells_the_usage(tmp_path: Path) -> None:
    # Counts from 0; the embedding of 5 is NaN, so that nothing can follow a 5.
    model = save_bigram(tmp_path / "model", np.roll(np.eye(16), 1, axis=1))
    broken = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        broken.model.embed_tokens.weight[5] = torch.nan
    broken.save_pretrained(model)
    async with (
        running(model, tmp_path / "traces", target=THREADS, draft=THREADS) as services,
        channel_to(services, "orchestrator") as channel,
    ):
        request = orchestrator_pb2.GenerateRequest(
            token_ids=orchestrator_pb2.TokenIds(ids=[15, 0]),
            sampling=orchestrator_pb2.SamplingParams(temperature=0),
        )
        call = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(request)
        ids = []
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for response in call:
                ids += [token.id for token in response.tokens]
        assert await call.code() is grpc.StatusCode.INTERNAL
        assert ids == [1, 2, 3, 4, 5]
        trailing = dict(await call.trailing_metadata())
        usage = orchestrator_pb2.Usage.FromString(trailing["specdec-usage-bin"])
        assert (usage.prompt_tokens, usage.completion_tokens) == (2, 5)
        await becomes_idle(services)


async def test_draining_is_shown_and_bounded(tmp_path: Path) -> None:
    """While a service drains it says so, refuses new work, and lets running work end."""
    model = save_random_llama(tmp_path / "model")
    async with (
        running(
            model,
            tmp_path / "traces",
            target=THREADS,
            draft=THREADS,
            orchestrator={"drain_grace_ms": 5_000},
        ) as services,
        channel_to(services, "orchestrator") as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stream = services.client.generate([1], temperature=0.0, max_tokens=100)
        await anext(aiter(stream))
        stopping = asyncio.create_task(services.orchestrator.stop())
        assert (await watch.read()).status == NOT_SERVING
        late = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(
            orchestrator_pb2.GenerateRequest(token_ids=orchestrator_pb2.TokenIds(ids=[1]))
        )
        assert await late.code() is grpc.StatusCode.UNAVAILABLE
        result = await stream.collect()
        assert len(result.token_ids) == 100
        await asyncio.wait_for(stopping, 5)
