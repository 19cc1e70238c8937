from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from specdec.telemetry import names
from specdec.telemetry.tracing import (
    MAX_ATTRIBUTE_LENGTH,
    Tracing,
    parse_traceparent,
    setup_tracing,
    trace_id_of,
)
from tests.otlp_collector import OtlpCollector

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"


@pytest.fixture
def black_hole(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A collector that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        yield endpoint


class StuckExporter(SpanExporter):
    """Never comes back until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.released.wait(30)
        return SpanExportResult.SUCCESS


def test_children_join_their_parents_trace_in_every_form(tmp_path: Path) -> None:
    tracing = setup_tracing("target", tmp_path)
    root = tracing.start_span(names.GENERATE)
    traceparent = tracing.traceparent_of(root)
    for parent in (root, root.get_span_context(), traceparent):
        child = tracing.start_span(names.VERIFY, parent=parent)
        assert trace_id_of(child) == trace_id_of(root)
        assert child.parent.span_id == root.get_span_context().span_id
        child.end()
    assert tracing.num_open_spans == 1
    root.end()
    assert tracing.num_open_spans == 0
    assert tracing.shutdown()


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        f"00-{TRACE_ID}-{SPAN_ID}",
        f"00-{TRACE_ID}-{SPAN_ID}-1",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
    ],
)
def test_malformed_traceparent_is_ignored(traceparent: str, tmp_path: Path) -> None:
    assert parse_traceparent(traceparent) is None
    tracing = setup_tracing("target", tmp_path)
    span = tracing.start_span(names.TARGET_VERIFY, parent=traceparent)
    assert span.parent is None
    span.end()
    tracing.shutdown()


def test_traceparent_of_later_versions_is_read() -> None:
    context = parse_traceparent(f"cc-{TRACE_ID}-{SPAN_ID}-01-more")
    assert context is not None
    assert f"{context.trace_id:032x}" == TRACE_ID


def test_unsampled_parent_is_respected(tmp_path: Path) -> None:
    tracing = setup_tracing("target", tmp_path)
    span = tracing.start_span(names.VERIFY, parent=f"00-{TRACE_ID}-{SPAN_ID}-00")
    assert not span.is_recording()
    assert tracing.traceparent_of(span).endswith("-00")
    span.end()
    tracing.shutdown()
    assert not list(tmp_path.iterdir())


def test_disabled_tracing_costs_nothing_and_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracing = setup_tracing("target", tmp_path)
    span = tracing.start_span(names.VERIFY, attributes={names.ROUND_INDEX: 1})
    child = tracing.start_span(names.DRAFT, parent=span)
    child.end()
    span.end()
    assert tracing.traceparent_of(span) == ""
    assert trace_id_of(span) == ""
    assert tracing.num_open_spans == 0
    assert tracing.shutdown()
    assert not list(tmp_path.iterdir())


def test_sampler_of_the_environment_is_honoured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracing = setup_tracing("target", tmp_path)
    assert not tracing.start_span(names.VERIFY).is_recording()
    tracing.shutdown()


def test_collector_gets_spans_of_each_service_and_none_of_the_export(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with OtlpCollector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        orchestrator, target = setup_tracing("orchestrator", None), setup_tracing("target", None)
        for _ in range(50):
            root = orchestrator.start_span(names.GENERATE)
            verify = orchestrator.start_span(names.VERIFY, parent=root)
            remote = target.start_span(
                names.TARGET_VERIFY, parent=orchestrator.traceparent_of(verify)
            )
            for span in (remote, verify, root):
                span.end()
        assert orchestrator.shutdown()
        assert target.shutdown()
        received = collector.spans_by_service
    assert len(received) == 150
    assert len({span.span_id for _, span in received}) == 150
    assert {(service, span.name) for service, span in received} == {
        ("orchestrator", names.GENERATE),
        ("orchestrator", names.VERIFY),
        ("target", names.TARGET_VERIFY),
    }
    known = {span.span_id for _, span in received}
    roots = [span for _, span in received if not span.parent_span_id]
    assert len(roots) == 50
    assert all(span.parent_span_id in known for _, span in received if span.parent_span_id)


def test_step_keeps_a_link_to_each_request_of_a_large_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with OtlpCollector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        tracing = setup_tracing("target", None)
        requests = [
            tracing.start_span(names.TARGET_VERIFY, parent=f"00-{TRACE_ID}-{SPAN_ID}-0{sampled}")
            for sampled in [1] * 300 + [0]
        ]
        links = tracing.links_to(requests)
        assert len(links) == 300
        step = tracing.start_span(
            names.TARGET_STEP,
            links=links,
            attributes={names.BATCH_SIZE: 300, "long": "x" * 10_000},
        )
        step.end()
        tracing.shutdown()
        (span,) = collector.spans
    assert len(span.links) == 300
    assert span.dropped_links_count == 0
    lengths = [len(item.value.string_value) for item in span.attributes]
    assert max(lengths) == MAX_ATTRIBUTE_LENGTH


def test_black_hole_slows_neither_spans_nor_shutdown(black_hole: str) -> None:
    tracing = setup_tracing("target", None)
    slowest_s = 0.0
    for _ in range(3_000):
        start = time.perf_counter()
        tracing.start_span(names.VERIFY).end()
        slowest_s = max(slowest_s, time.perf_counter() - start)
    assert slowest_s < 1  # an export would take ten
    start = time.monotonic()
    assert not tracing.shutdown(timeout_ms=300)
    assert time.monotonic() - start < 1


def test_process_with_a_black_hole_ends_in_time(black_hole: str) -> None:
    code = textwrap.dedent(
        """
        from specdec.telemetry.tracing import setup_tracing
        tracing = setup_tracing("target", None)
        for _ in range(1000):
            tracing.start_span("verify").end()
        tracing.shutdown(timeout_ms=300)
        """
    )
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)
    assert time.monotonic() - start < 4


def test_stuck_exporter_drops_spans_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    exporter = StuckExporter()
    tracing = Tracing(TracerProvider(shutdown_on_exit=False), exporter)
    for _ in range(1_000):
        tracing.start_span(names.VERIFY).end()
    assert tracing.num_dropped_spans == 900
    assert tracing.num_open_spans == 0
    exporter.released.set()
    assert tracing.shutdown()
    assert tracing.num_dropped_spans == 900
    tracing.start_span(names.VERIFY).end()
    assert tracing.num_dropped_spans == 901


def test_a_span_is_cheap(tmp_path: Path) -> None:
    tracing = setup_tracing("target", tmp_path)
    root = tracing.start_span(names.GENERATE)
    best_us = min(_span_cost_us(tracing, root) for _ in range(10))
    root.end()
    tracing.shutdown()
    # About 20 in practice; the bound leaves room for a busy machine.
    assert best_us < 100


def _span_cost_us(tracing: Tracing, root: object) -> float:
    start = time.perf_counter()
    for index in range(200):
        tracing.start_span(
            names.VERIFY,
            parent=root,  # type: ignore[arg-type]
            attributes={names.ROUND_INDEX: index, names.NUM_DRAFT_TOKENS: 5},
        ).end()
    return (time.perf_counter() - start) / 200 * 1e6
