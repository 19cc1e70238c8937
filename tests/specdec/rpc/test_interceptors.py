from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from opentelemetry.trace import SpanKind, StatusCode

from specdec.rpc.interceptors import current_span, tracing_client_interceptors
from specdec.telemetry import names
from specdec.v1 import orchestrator_pb2
from tests.specdec.rpc.fake_orchestrator import (
    MAX_MESSAGE_BYTES,
    Service,
    generate_request,
    open_stub,
    running_service,
)

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


async def failure_of(stub: Any, how: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in stub.Generate(generate_request(how)):
            pass
    return raised.value


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    status = rpc_status.from_call(_Call(error))
    assert status is not None
    kinds = (
        error_details_pb2.ErrorInfo,
        error_details_pb2.BadRequest,
        error_details_pb2.RetryInfo,
    )
    unpacked = {}
    for detail in status.details:
        for kind in kinds:
            if detail.Is(kind.DESCRIPTOR):
                unpacked[kind.__name__] = kind.FromString(detail.value)
    return unpacked


class _Call:
    """An error as rpc_status expects a call."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code
        self.details = error.details
        self.trailing_metadata = error.trailing_metadata


@pytest.mark.parametrize("traced", [True, False])
async def test_errors_are_the_same_with_tracing_on_and_off(traced: bool) -> None:
    async with running_service(traced) as service, open_stub(service) as stub:
        invalid = await failure_of(stub, "invalid")
        assert invalid.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert invalid.details() == "sampling.top_p: must be in (0, 1], not 2"
        details = details_of(invalid)
        assert details["ErrorInfo"].reason == "INVALID_VALUE"
        assert details["ErrorInfo"].domain == "specdec.v1"
        assert details["BadRequest"].field_violations[0].field == "sampling.top_p"

        exhausted = await failure_of(stub, "exhausted")
        assert exhausted.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(exhausted)["RetryInfo"].retry_delay.ToMilliseconds() == 1500

        boom = await failure_of(stub, "boom")
        assert boom.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in (boom.details() or "")
        assert dict(boom.trailing_metadata())["specdec-usage-bin"] == b"3"

        abort = await failure_of(stub, "abort")
        assert (abort.code(), abort.details()) == (grpc.StatusCode.ABORTED, "own words")
        assert dict(abort.trailing_metadata())["own"] == "yes"
        await service.idle()
        assert service.servicer.num_cleanups == 4


async def test_server_span_lasts_as_long_as_the_stream_and_parents_the_rounds() -> None:
    async with running_service() as service, open_stub(service) as stub:
        call = stub.Generate(generate_request(), metadata=((names.TRACEPARENT, TRACEPARENT),))
        assert dict(await call.initial_metadata())[names.TRACE_ID] == TRACE_ID
        assert [response.text async for response in call] == ["one", "two"]
        await service.idle()

        (span,) = service.spans()
        assert span.kind is SpanKind.SERVER
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == PARENT_ID
        assert span.attributes == {
            names.RPC_SYSTEM: "grpc",
            names.RPC_SERVICE: "specdec.v1.OrchestratorService",
            names.RPC_METHOD: "Generate",
            names.RPC_GRPC_STATUS_CODE: 0,
        }
        assert span.status.is_unset
        rounds = service.spans(names.VERIFY)
        assert [round.attributes[names.ROUND_INDEX] for round in rounds] == [0, 1]
        for verify in rounds:
            assert verify.parent == span.context
            assert verify.end_time <= span.end_time


async def test_malformed_traceparent_starts_a_new_trace() -> None:
    async with running_service() as service, open_stub(service) as stub:
        await stub.GetModelInfo(_model_info_request(), metadata=((names.TRACEPARENT, "00-zz"),))
        await service.idle()
        (span,) = service.spans("specdec.v1.OrchestratorService/GetModelInfo")
        assert span.parent is None


@pytest.mark.parametrize(
    ("how", "code", "is_error", "num_events"),
    [
        ("invalid", 3, False, 1),
        ("exhausted", 8, False, 1),
        ("boom", 13, True, 1),
        ("abort", 10, False, 1),
    ],
)
async def test_only_server_faults_are_errors(
    how: str, code: int, is_error: bool, num_events: int
) -> None:
    async with running_service() as service, open_stub(service) as stub:
        await failure_of(stub, how)
        await service.idle()
        (span,) = service.spans()
        assert span.attributes[names.RPC_GRPC_STATUS_CODE] == code
        assert (span.status.status_code is StatusCode.ERROR) == is_error
        assert len(span.events) == num_events
        assert "secret" not in str(dict(span.events[0].attributes))


async def test_exception_event_names_the_true_error() -> None:
    async with running_service() as service, open_stub(service) as stub:
        await failure_of(stub, "boom")
        await failure_of(stub, "invalid")
        await service.idle()
        types = [span.events[0].attributes[names.EXCEPTION_TYPE] for span in service.spans()]
        assert types == ["builtins.ValueError", "specdec.errors.InvalidArgumentError"]


async def test_cancelling_ends_handler_and_span_without_an_error() -> None:
    async with running_service() as service, open_stub(service) as stub:
        call = stub.Generate(generate_request("hang"))
        await call.read()
        call.cancel()
        await service.idle()
        (span,) = service.spans()
        assert span.attributes[names.RPC_GRPC_STATUS_CODE] == 1
        assert span.status.is_unset
        assert not span.events
        assert service.servicer.num_cleanups == 1


async def test_many_cancelled_calls_leave_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_service() as service, open_stub(service) as stub:

        async def cancel_mid_stream() -> None:
            call = stub.Generate(generate_request("hang", "word " * 500))
            for _ in range(3):
                await call.read()
            call.cancel()

        for _ in range(5):
            await asyncio.gather(*(cancel_mid_stream() for _ in range(20)))
        await service.idle()
        assert service.servicer.num_cleanups == 100
        assert len(service.spans()) == 100
        assert all(span.status.is_unset for span in service.spans())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_deadline_is_told_from_cancelling() -> None:
    async with running_service() as service, open_stub(service) as stub:
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in stub.Generate(generate_request("hang"), timeout=0.2):
                pass
        await service.idle()
        assert service.spans()[0].attributes[names.RPC_GRPC_STATUS_CODE] == 4


@asynccontextmanager
async def traced_stub() -> AsyncIterator[tuple[Service, Any]]:
    async with (
        running_service() as service,
        open_stub(service, tracing_client_interceptors(service.tracing)) as stub,
    ):
        yield service, stub


async def test_client_span_joins_the_callers_trace() -> None:
    async with traced_stub() as (service, stub):
        responses = [response.text async for response in stub.Generate(generate_request())]
        await stub.GetModelInfo(_model_info_request())
        await service.idle()
        assert responses == ["one", "two"]
        client, server = sorted(service.spans(), key=lambda span: span.start_time)
        assert (client.kind, server.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
        assert server.parent.span_id == client.context.span_id
        assert client.attributes[names.RPC_GRPC_STATUS_CODE] == 0
        assert len(service.spans("specdec.v1.OrchestratorService/GetModelInfo")) == 2
        assert not current_span().get_span_context().is_valid


@pytest.mark.parametrize("intercepted", [True, False])
@pytest.mark.parametrize("by_task", [True, False])
async def test_cancelling_is_the_same_with_client_tracing(intercepted: bool, by_task: bool) -> None:
    async with running_service() as service:
        interceptors = tracing_client_interceptors(service.tracing) if intercepted else []
        async with open_stub(service, interceptors) as stub:
            call = stub.Generate(generate_request("hang"))
            received = asyncio.Event()

            async def consume() -> None:
                async for _ in call:
                    received.set()

            task = asyncio.create_task(consume())
            await received.wait()
            if by_task:
                task.cancel()
            else:
                call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await service.idle()
            assert service.servicer.num_cleanups == 1
            assert len(service.spans()) == 1 + intercepted
            assert all(
                span.attributes[names.RPC_GRPC_STATUS_CODE] == 1 and span.status.is_unset
                for span in service.spans()
            )


async def test_call_that_is_never_sent_fails_at_once() -> None:
    async with traced_stub() as (service, stub):
        start = time.monotonic()
        call = stub.Generate(generate_request(prompt="x" * (MAX_MESSAGE_BYTES + 1)), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert time.monotonic() - start < 1
        await service.idle()


async def test_unreachable_server_fails_with_its_status() -> None:
    async with running_service() as service:
        await service.server.stop(0)
        async with open_stub(service, tracing_client_interceptors(service.tracing)) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.GetModelInfo(_model_info_request())
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            await service.idle()
            (span,) = service.spans("specdec.v1.OrchestratorService/GetModelInfo")
            assert span.status.status_code is StatusCode.ERROR


def _model_info_request() -> Any:
    return orchestrator_pb2.GetModelInfoRequest()
