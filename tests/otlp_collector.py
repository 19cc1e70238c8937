"""An OTLP collector to test against: it keeps every span it is sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2,
    trace_service_pb2_grpc,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class OtlpCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on a free port of the loopback interface while it is entered."""

    def __init__(self) -> None:
        self.requests: list[trace_service_pb2.ExportTraceServiceRequest] = []
        self._server = grpc.server(ThreadPoolExecutor(max_workers=2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def endpoint(self) -> str:
        """Value for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def spans(self) -> list[Span]:
        """Every span received."""
        return [span for _, span in self.spans_by_service]

    @property
    def spans_by_service(self) -> list[tuple[str, Span]]:
        """Every span received, with its service's name."""
        return [
            (_service_name(resource_spans.resource.attributes), span)
            for request in self.requests
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(None).wait()


def _service_name(attributes: Any) -> str:
    names = [item.value.string_value for item in attributes if item.key == "service.name"]
    return names[0] if names else ""
