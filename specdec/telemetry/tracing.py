"""Tracing of one service.

Every service has a `Tracing` of its own and passes it around: nothing is
global, so the three services can run in one process, and parents are always
named, so no context is attached or detached on the way of a token.

Ended spans go into a bounded queue and a thread of the SDK exports them. When
the exporter cannot keep up, spans are dropped and counted; a request never
waits for telemetry, and neither does the end of the process.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    TraceFlags,
)
from opentelemetry.util.types import AttributeValue

from specdec.telemetry.light_span import LightSpan
from specdec.telemetry.span_queue import SpanQueue
from specdec.telemetry.trace_file import TraceFileExporter, default_trace_dir

# A step links the whole batch; the SDK's 128 would cut large ones.
MAX_LINKS = 1024
MAX_ATTRIBUTE_LENGTH = 1024
FLUSH_TIMEOUT_MS = 5_000

Parent: TypeAlias = Span | SpanContext | str | None
"""A span, its context, or a W3C traceparent; None or "" for a new trace."""

_EMPTY = Context()
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class Tracing:
    """Starts the spans of one service and sees them off."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter | None) -> None:
        """Takes a provider that has no processors yet.

        Args:
            provider: Makes the spans.
            exporter: Where ended spans go; None keeps none.
        """
        self._provider = provider
        self._queue = SpanQueue(exporter)
        provider.add_span_processor(self._queue)
        self.tracer = provider.get_tracer("specdec")
        self._scope = InstrumentationScope("specdec")

    @property
    def num_open_spans(self) -> int:
        """Spans started and not ended."""
        return self._queue.num_open

    @property
    def num_dropped_spans(self) -> int:
        """Spans ended and lost: the queue was full, or the exporter failed."""
        return self._queue.num_dropped

    def start_span(
        self,
        name: str,
        *,
        parent: Parent = None,
        links: Sequence[Link] = (),
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, AttributeValue] | None = None,
        start_time_ns: int | None = None,
    ) -> Span:
        """Starts a span; the caller ends it.

        Args:
            name: One of `specdec.telemetry.names`.
            parent: What it is a part of; a malformed one counts as None.
            links: Spans of other traces it served.
            kind: Its role in an RPC.
            attributes: Keys of `specdec.telemetry.names`.
            start_time_ns: When it started, in ns since the epoch; None is now.

        Returns:
            The span, to be ended with `end()`.
        """
        if kind is SpanKind.INTERNAL and parent:
            parent_context = _span_context(parent)
            if parent_context is not None and parent_context.trace_flags.sampled:
                return self._start_light(name, parent_context, links, attributes, start_time_ns)
        context = _context(parent)
        return self.tracer.start_span(name, context, kind, attributes, links, start_time_ns)

    def start_step(
        self, name: str, spans: Iterable[Span], attributes: Mapping[str, AttributeValue]
    ) -> Span:
        """Starts the span of an engine's step, in a trace of its own.

        Args:
            name: One of `specdec.telemetry.names`.
            spans: The spans the step serves; it links those that are sampled.
            attributes: Keys of `specdec.telemetry.names`.

        Returns:
            The span, to be ended with `end()`; one that records nothing if the step
            serves nothing sampled.
        """
        links = self.links_to(spans)
        return self._start_light(name, None, links, attributes) if links else INVALID_SPAN

    def _start_light(
        self,
        name: str,
        parent: SpanContext | None,
        links: Sequence[Link],
        attributes: Mapping[str, AttributeValue] | None,
        start_time_ns: int | None = None,
    ) -> LightSpan:
        self._queue.on_started()
        return LightSpan(
            name,
            parent,
            resource=self._provider.resource,
            scope=self._scope,
            attributes=attributes,
            links=links,
            start_time_ns=start_time_ns,
            on_end=self._queue.on_end,
        )

    @staticmethod
    def traceparent_of(span: Span) -> str:
        """The span as W3C traceparent; "" when tracing is off."""
        context = span.get_span_context()
        if not context.is_valid:
            return ""
        flags = context.trace_flags & TraceFlags.SAMPLED
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    @staticmethod
    def links_to(spans: Iterable[Span]) -> list[Link]:
        """Links to those of the spans that are sampled."""
        contexts = (span.get_span_context() for span in spans)
        return [Link(context) for context in contexts if context.trace_flags.sampled]

    def flush(self, timeout_ms: int = FLUSH_TIMEOUT_MS) -> bool:
        """Exports what has ended so far.

        Args:
            timeout_ms: Longest wait, in ms.

        Returns:
            Whether it was done in time.
        """
        return _run_bounded(self._provider.force_flush, timeout_ms)

    def shutdown(self, timeout_ms: int = FLUSH_TIMEOUT_MS) -> bool:
        """Exports what is left and stops.

        Args:
            timeout_ms: Longest wait, in ms; the exporter's own retries are
                left behind on a daemon thread.

        Returns:
            Whether it was done in time.
        """
        return _run_bounded(self._provider.shutdown, timeout_ms)


def setup_tracing(service_name: str, trace_dir: Path | None) -> Tracing:
    """Sets up the tracing of one service.

    Spans go to the OTLP endpoint named by OTEL_EXPORTER_OTLP_ENDPOINT, else to
    files. OTEL_SDK_DISABLED, OTEL_TRACES_SAMPLER, OTEL_BSP_* and
    OTEL_RESOURCE_ATTRIBUTES mean what they mean everywhere.

    Args:
        service_name: The service, as traces show it.
        trace_dir: Folder of the files; None picks the user's state folder.

    Returns:
        The service's tracing, to be shut down by the caller.
    """
    resource = Resource.create(
        {
            "service.name": service_name,
            "service.instance.id": str(uuid.uuid4()),
            "process.pid": os.getpid(),
        }
    )
    limits = SpanLimits(max_links=MAX_LINKS, max_attribute_length=MAX_ATTRIBUTE_LENGTH)
    # The SDK's own shutdown at exit may take half a minute; ours is bounded.
    provider = TracerProvider(resource=resource, span_limits=limits, shutdown_on_exit=False)
    return Tracing(provider, _make_exporter(service_name, trace_dir))


def trace_id_of(span: Span) -> str:
    """The span's trace, 32 hex digits, as Jaeger shows it; "" when tracing is off."""
    context = span.get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def parse_traceparent(traceparent: str) -> SpanContext | None:
    """Reads a W3C traceparent; None when it is malformed."""
    match = _TRACEPARENT.fullmatch(traceparent)
    # Version ff is forbidden, and version 00 has exactly four fields.
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    context = SpanContext(
        int(match[2], 16),
        int(match[3], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match[4], 16)),
    )
    return context if context.is_valid else None


def _span_context(parent: Span | SpanContext | str) -> SpanContext | None:
    """The ids of a parent; None when there are none."""
    if isinstance(parent, str):
        return parse_traceparent(parent)
    context = parent if isinstance(parent, SpanContext) else parent.get_span_context()
    return context if context.is_valid else None


def _context(parent: Parent) -> Context:
    """The context a span starts in: always a named one, never the ambient one."""
    if isinstance(parent, str):
        parent = parse_traceparent(parent)
    if parent is None:
        return _EMPTY
    span = NonRecordingSpan(parent) if isinstance(parent, SpanContext) else parent
    return trace.set_span_in_context(span, _EMPTY)


def _make_exporter(service_name: str, trace_dir: Path | None) -> SpanExporter | None:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if any(os.environ.get(name) for name in endpoints):
        # Imported late: it is slow to load and not needed for files.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    return TraceFileExporter(trace_dir or default_trace_dir(), service_name)


def _run_bounded(action: Callable[[], object], timeout_ms: int) -> bool:
    """Runs it on a daemon thread, and stops waiting when the time is up."""
    thread = threading.Thread(target=action, name="tracing", daemon=True)
    thread.start()
    thread.join(timeout_ms / 1_000)
    return not thread.is_alive()
