"""The bounded queue between ended spans and their export."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import cast

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from specdec.telemetry.light_span import LightSpan

# A busy service ends some thousand spans per second, and a queued span takes 2
# to 3 kB: room for several seconds in about 20 MB.
MAX_QUEUED_SPANS = 8192
# Short, so that a trace can be looked at right after its request, and so that an
# export is a small piece of work beside the engine.
SCHEDULE_DELAY_MS = 250


class SpanQueue(SpanProcessor):
    """The SDK's batch processor behind a count of what is on its way.

    The SDK drops silently when its queue is full. Here the count refuses first,
    so that every loss is known and the SDK's queue never overflows.
    """

    def __init__(self, exporter: SpanExporter | None) -> None:
        """Starts the export thread; None as exporter keeps no spans."""
        self.num_open = 0
        self.num_dropped = 0
        self._num_pending = 0
        self._lock = threading.Lock()
        self._is_shut_down = False
        self._capacity = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or MAX_QUEUED_SPANS)
        self._batches: BatchSpanProcessor | None = None
        if exporter is not None:
            self._batches = BatchSpanProcessor(
                _CountingExporter(exporter, self._on_exported),
                max_queue_size=self._capacity,
                schedule_delay_millis=float(
                    os.environ.get("OTEL_BSP_SCHEDULE_DELAY") or SCHEDULE_DELAY_MS
                ),
                max_export_batch_size=min(512, self._capacity),
            )

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Counts a span as open."""
        self.on_started()

    def on_started(self) -> None:
        """Counts a span as open that the SDK did not start."""
        with self._lock:
            self.num_open += 1

    def on_end(self, span: ReadableSpan | LightSpan) -> None:
        """Queues a span, or drops and counts it; never waits."""
        context = span.get_span_context()
        is_sampled = context is not None and context.trace_flags.sampled
        with self._lock:
            self.num_open -= 1
            if self._batches is None or not is_sampled:
                return
            if self._is_shut_down or self._num_pending >= self._capacity:
                self.num_dropped += 1
                return
            self._num_pending += 1
        # It asks a span for its context, no more; the exporter below gets readable ones.
        self._batches.on_end(cast("ReadableSpan", span))

    def _on_exported(self, num_spans: int, success: bool) -> None:
        with self._lock:
            self._num_pending -= num_spans
            if not success:
                self.num_dropped += num_spans

    def shutdown(self) -> None:
        """Exports what is queued; as long as the exporter takes, within half a minute."""
        self._is_shut_down = True
        if self._batches is not None:
            self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Exports what is queued; as long as the exporter takes."""
        return self._batches is None or self._batches.force_flush(timeout_millis)


class _CountingExporter(SpanExporter):
    """Tells how each export of another exporter ended."""

    def __init__(self, exporter: SpanExporter, on_exported: Callable[[int, bool], None]) -> None:
        self._exporter = exporter
        self._on_exported = on_exported

    def export(self, spans: Sequence[ReadableSpan | LightSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(
                [span.to_readable() if isinstance(span, LightSpan) else span for span in spans]
            )
        finally:
            self._on_exported(len(spans), result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
