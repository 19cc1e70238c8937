"""The trace of a request: one tree over three services, and the steps that served it."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from specdec.rpc.channel import open_channel
from specdec.telemetry import names
from specdec.telemetry.trace_store import StoredSpan, Trace, load_trace
from specdec.telemetry.trace_view import render_waterfall
from specdec.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from tests.integration.checks import becomes_idle, generate
from tests.services import Services, running
from tests.toy_models import save_noisy_copy, save_random_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN_ID = "b7ad6b7169203331"
WORDS = "t11 t12 t13 t14"


@pytest.fixture(scope="module")
def trace_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(
    trace_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Services]:
    folder = tmp_path_factory.mktemp("models")
    target = save_random_llama(folder / "target")
    draft = save_noisy_copy(target, folder / "draft", noise=0.03)
    settings = {"num_threads": 1}
    async with running(
        target, trace_dir, draft_model=draft, drafter="model", target=settings, draft=settings
    ) as services:
        yield services


async def flush(services: Services) -> None:
    await becomes_idle(services)
    for service in (services.orchestrator, services.draft, services.target):
        assert await asyncio.to_thread(service.tracing.flush)
        assert service.tracing.num_dropped_spans == 0


def by_name(trace: Trace) -> dict[str, list[StoredSpan]]:
    spans = defaultdict(list)
    for span in trace.spans:
        spans[span.name].append(span)
    return spans


async def test_one_request_is_one_tree_over_three_services(
    services: Services, trace_dir: Path
) -> None:
    request = orchestrator_pb2.GenerateRequest(
        request_id="shape",
        prompt=WORDS,
        sampling=orchestrator_pb2.SamplingParams(
            temperature=0, max_tokens=24, stop=["t11 t12 t99"], seed=2**64 - 1
        ),
        speculation=orchestrator_pb2.SpeculationParams(num_speculative_tokens=3, drafter="model"),
    )
    async with open_channel(services.orchestrator.address, 2**20) as channel:
        call = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(
            request, metadata=(("traceparent", f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01"),)
        )
        responses = [response async for response in call]
    last = responses[-1]
    await flush(services)
    trace = load_trace(trace_dir, TRACE_ID)
    spans = by_name(trace)

    # One tree.
    span_ids = [span.span_id for span in trace.spans]
    assert len(set(span_ids)) == len(span_ids)
    (root,) = [span for span in trace.spans if span.parent_id not in span_ids]
    assert root.is_generate
    assert root.parent_id == CLIENT_SPAN_ID
    assert {span.service for span in trace.spans} == {
        "orchestrator",
        "draft_service",
        "target_service",
    }
    assert set(spans) == {
        names.GENERATE,
        names.DRAFT,
        names.PROPOSE,
        names.VERIFY,
        names.TARGET_VERIFY,
        names.ROLLBACK,
    }
    parents = {span.span_id: span for span in trace.spans}
    for child, parent, service in (
        (names.DRAFT, names.GENERATE, "orchestrator"),
        (names.VERIFY, names.GENERATE, "orchestrator"),
        (names.ROLLBACK, names.GENERATE, "orchestrator"),
        (names.PROPOSE, names.DRAFT, "draft_service"),
        (names.TARGET_VERIFY, names.VERIFY, "target_service"),
    ):
        for span in spans[child]:
            assert parents[span.parent_id].name == parent
            assert span.service == service
            # One clock here, so that each lies within what it is a part of.
            if child != names.PROPOSE:
                assert parents[span.parent_id].start_ns <= span.start_ns <= span.end_ns
            assert span.start_ns <= root.end_ns
            assert not span.is_error

    # One of each per round, with the counts the client was told.
    num_rounds = last.speculation.num_rounds
    rounds = list(range(num_rounds))
    for name in (names.VERIFY, names.TARGET_VERIFY):
        assert [span.attributes[names.ROUND_INDEX] for span in spans[name]] == rounds
    for span, inner in zip(spans[names.VERIFY], spans[names.TARGET_VERIFY], strict=True):
        for key in (names.BASE_LENGTH, names.NUM_DRAFT_TOKENS, names.NUM_ACCEPTED_TOKENS):
            assert span.attributes[key] == inner.attributes[key]
    drafted = {
        span.attributes[names.ROUND_INDEX]: span.attributes.get(names.NUM_DRAFT_TOKENS, 0)
        for span in spans[names.DRAFT]
    }
    assert [drafted.get(index, 0) for index in rounds] == [
        span.attributes[names.NUM_DRAFT_TOKENS] for span in spans[names.VERIFY]
    ]
    assert len(spans[names.PROPOSE]) == sum(num_tokens > 0 for num_tokens in drafted.values())
    rejected = {
        span.attributes[names.ROUND_INDEX]: span.attributes[names.NUM_DRAFT_TOKENS]
        - span.attributes[names.NUM_ACCEPTED_TOKENS]
        for span in spans[names.VERIFY]
    }
    assert {
        span.attributes[names.ROUND_INDEX]: span.attributes[names.NUM_REJECTED_TOKENS]
        for span in spans[names.ROLLBACK]
    } == {index: count for index, count in rejected.items() if count}
    assert root.attributes[names.NUM_ROUNDS] == num_rounds
    assert root.attributes[names.NUM_DRAFT_TOKENS] == last.speculation.num_draft_tokens
    assert root.attributes[names.NUM_ACCEPTED_TOKENS] == last.speculation.num_accepted_tokens
    assert root.attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] == last.usage.completion_tokens == 24
    assert root.attributes[names.REQUEST_ID] == "shape"
    assert root.attributes[names.DRAFTER] == "model"
    assert root.attributes[names.RPC_GRPC_STATUS_CODE] == 0

    # The steps that served it.
    served = {
        linked
        for step in trace.steps
        if step.name == names.TARGET_STEP
        for linked in step.linked_span_ids
    }
    assert served == {(TRACE_ID, span.span_id) for span in spans[names.TARGET_VERIFY]}
    proposed = {
        linked
        for step in trace.steps
        if step.name == names.DRAFT_STEP
        for linked in step.linked_span_ids
    }
    assert proposed == {(TRACE_ID, span.span_id) for span in spans[names.PROPOSE]}
    for step in trace.steps:
        assert step.trace_id != TRACE_ID
        assert step.parent_id == ""

    # No text in it.
    output = "".join(response.text for response in responses)
    words = {*WORDS.split(), *output.split(), "t99"}
    for span in (*trace.spans, *trace.steps):
        for value in span.attributes.values():
            assert words.isdisjoint(str(value).split())
        assert "events" not in span.encoded

    # It can be drawn.
    assert render_waterfall(trace, 40, full=True).row_count >= len(trace.spans)


async def test_steps_link_every_request_of_their_batch(services: Services, trace_dir: Path) -> None:
    results = await asyncio.gather(
        *[generate(services.client, WORDS, temperature=0.0, max_tokens=24) for _ in range(3)]
    )
    await flush(services)
    traces = [load_trace(trace_dir, result.trace_id) for result in results]
    assert len({trace.trace_id for trace in traces}) == 3
    own = {trace.trace_id for trace in traces}
    steps = {step.span_id: step for trace in traces for step in trace.steps}
    target_steps = [step for step in steps.values() if step.name == names.TARGET_STEP]
    for step in target_steps:
        linked = {trace_id for trace_id, _ in step.linked_span_ids}
        assert linked <= own
        assert len(step.linked_span_ids) == step.attributes[names.BATCH_SIZE]
    assert max(step.attributes[names.BATCH_SIZE] for step in target_steps) > 1
    for trace in traces:
        (root,) = [span for span in trace.spans if not span.parent_id]
        assert root.is_generate


async def test_a_failed_request_has_a_whole_tree_too(services: Services, trace_dir: Path) -> None:
    async with open_channel(services.orchestrator.address, 2**20) as channel:
        call = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(
            orchestrator_pb2.GenerateRequest(
                prompt=WORDS, sampling=orchestrator_pb2.SamplingParams(top_p=2.0)
            )
        )
        trace_id = dict(await call.initial_metadata())["specdec-trace-id"]
        assert (await call.code()).name == "INVALID_ARGUMENT"
    stream = services.client.generate(WORDS, temperature=0.0, request_id="left")
    await anext(aiter(stream))
    stream.cancel()
    await flush(services)
    (refused,) = load_trace(trace_dir, trace_id).spans
    assert refused.is_generate
    assert refused.attributes[names.RPC_GRPC_STATUS_CODE] == 3
    assert not refused.is_error  # the caller's doing
    left = load_trace(trace_dir, "last")
    ids = {span.span_id for span in left.spans}
    (root,) = [span for span in left.spans if span.parent_id not in ids]
    assert root.attributes[names.REQUEST_ID] == "left"
    assert root.attributes[names.RPC_GRPC_STATUS_CODE] == 1
