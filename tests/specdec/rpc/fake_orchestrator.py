"""A servicer whose Generate does what the request id says, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from specdec.errors import InvalidArgumentError, ResourceExhaustedError
from specdec.rpc.channel import open_channel
from specdec.rpc.interceptors import (
    ActiveRpcInterceptor,
    ErrorInterceptor,
    TracingInterceptor,
    current_span,
)
from specdec.rpc.server import GrpcServer
from specdec.telemetry import names
from specdec.telemetry.tracing import Tracing, trace_id_of
from specdec.v1 import orchestrator_pb2, orchestrator_pb2_grpc

SERVICE = "specdec.v1.OrchestratorService"
MAX_MESSAGE_BYTES = 1024 * 1024
SECRET = "secret prompt"


class FakeOrchestrator(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Yields the words of the prompt, or fails as asked."""

    def __init__(self, tracing: Tracing) -> None:
        self.num_written = 0
        self.num_cleanups = 0
        self._tracing = tracing

    async def Generate(self, request: Any, context: Any) -> Any:
        try:
            span = current_span()
            await context.send_initial_metadata(((names.TRACE_ID, trace_id_of(span)),))
            for index, word in enumerate(request.prompt.split()):
                verify = self._tracing.start_span(
                    names.VERIFY, parent=span, attributes={names.ROUND_INDEX: index}
                )
                verify.end()
                self.num_written += 1
                yield orchestrator_pb2.GenerateResponse(text=word)
            await self._end(request.request_id, context)
        finally:
            self.num_cleanups += 1

    async def _end(self, how: str, context: Any) -> None:
        if how == "invalid":
            raise InvalidArgumentError("sampling.top_p", "must be in (0, 1], not 2")
        if how == "exhausted":
            raise ResourceExhaustedError("queue full", reason="QUEUE_FULL", retry_after_ms=1500)
        if how == "boom":
            context.set_trailing_metadata((("specdec-usage-bin", b"3"),))
            raise ValueError(SECRET)
        if how == "abort":
            await context.abort(grpc.StatusCode.ABORTED, "own words", (("own", "yes"),))
        if how == "hang":
            await asyncio.sleep(60)

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return orchestrator_pb2.GetModelInfoResponse()


class Service:
    """A running fake, and everything a test looks at."""

    def __init__(self, traced: bool) -> None:
        self._exporter = InMemorySpanExporter()
        resource = Resource({"service.name": "orchestrator"})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.tracing = Tracing(provider, self._exporter)
        self.active = ActiveRpcInterceptor()
        self.servicer = FakeOrchestrator(self.tracing)
        interceptors: list[grpc.aio.ServerInterceptor] = [self.active, ErrorInterceptor()]
        if traced:
            interceptors.insert(1, TracingInterceptor(self.tracing))
        self.server = GrpcServer(
            host="127.0.0.1",
            port=0,
            service_names=[SERVICE],
            reflection=True,
            max_message_bytes=MAX_MESSAGE_BYTES,
            interceptors=interceptors,
        )
        self.server.add(
            lambda server: orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(
                self.servicer, server
            )
        )
        self.address = ""

    def spans(self, name: str = names.GENERATE) -> list[ReadableSpan]:
        """Ended spans of that name."""
        self.tracing.flush()
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    async def idle(self) -> None:
        """Waits until no handler runs and no span is open."""
        async with asyncio.timeout(2):
            while True:
                if not self.active.num_active and not self.tracing.num_open_spans:
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running_service(traced: bool = True) -> AsyncIterator[Service]:
    """Starts a fake that serves, and stops it."""
    service = Service(traced)
    service.address = f"127.0.0.1:{await service.server.start()}"
    service.server.set_serving(True)
    try:
        yield service
    finally:
        await service.server.stop(0)
        service.tracing.shutdown()


@asynccontextmanager
async def open_stub(
    service: Service, interceptors: Sequence[grpc.aio.ClientInterceptor] = ()
) -> AsyncIterator[Any]:
    """A stub of the fake."""
    async with open_channel(service.address, MAX_MESSAGE_BYTES, interceptors) as channel:
        yield orchestrator_pb2_grpc.OrchestratorServiceStub(channel)


def generate_request(how: str = "ok", prompt: str = "one two") -> Any:
    """A request; `how` says how it ends."""
    return orchestrator_pb2.GenerateRequest(request_id=how, prompt=prompt)
