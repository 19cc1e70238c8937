from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as encode_protobuf
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Link, SpanKind, StatusCode

from specdec.telemetry import names
from specdec.telemetry.trace_file import (
    MAX_FILES,
    TraceFileExporter,
    default_trace_dir,
    encode_spans,
)


def make_span() -> ReadableSpan:
    """A span with everything in it."""
    resource = Resource({"service.name": "target", "process.pid": 7})
    tracer = TracerProvider(resource=resource, shutdown_on_exit=False).get_tracer("specdec")
    with tracer.start_as_current_span("parent") as parent:
        span = tracer.start_span(
            names.TARGET_VERIFY,
            kind=SpanKind.SERVER,
            links=[Link(parent.get_span_context(), {"why": "batch"})],
            attributes={
                "int": 3,
                "bool": True,
                "float": 0.5,
                "text": "é\n",
                "list": ["stop", "length"],
                "ints": [1, 2],
            },
        )
        span.add_event("exception", {"exception.type": "ValueError"})
        span.set_status(StatusCode.ERROR, "INTERNAL")
        span.end()
    assert isinstance(span, ReadableSpan)
    return span


def test_line_is_what_protobuf_would_say_with_hex_ids() -> None:
    span = make_span()
    ours = json.loads(encode_spans([span]))["resourceSpans"][0]
    theirs = json_format.MessageToDict(encode_protobuf([span]))["resourceSpans"][0]
    (ours_span,) = ours["scopeSpans"][0]["spans"]
    (theirs_span,) = theirs["scopeSpans"][0]["spans"]
    assert ours["resource"] == theirs["resource"]
    theirs_span = _with_hex_ids(theirs_span)
    # Numbers instead of enum names, which OTLP/JSON demands.
    theirs_span["kind"], theirs_span["status"]["code"] = 2, 2
    for part in (theirs_span, *theirs_span["links"]):
        del part["flags"]
    assert ours_span == theirs_span
    assert re.fullmatch("[0-9a-f]{32}", ours_span["traceId"])
    assert re.fullmatch("[0-9]{19}", ours_span["startTimeUnixNano"])


def _with_hex_ids(message: dict[str, Any]) -> dict[str, Any]:
    converted: dict[str, Any] = {}
    for key, value in message.items():
        if key in ("traceId", "spanId", "parentSpanId"):
            converted[key] = base64.b64decode(value).hex()
        elif key == "links":
            converted[key] = [_with_hex_ids(link) for link in value]
        else:
            converted[key] = value
    return converted


def test_full_files_are_followed_by_new_ones_and_old_ones_go(tmp_path: Path) -> None:
    other = tmp_path / "draft-1-0.jsonl"
    other.write_text("")
    exporter = TraceFileExporter(tmp_path, "target", max_bytes=2_000)
    span = make_span()
    for _ in range(20):
        assert exporter.export([span] * 2) is SpanExportResult.SUCCESS
    exporter.shutdown()
    files = list(tmp_path.glob("target-*.jsonl"))
    assert len(files) == MAX_FILES
    assert all(path.stat().st_size < 5_000 for path in files)
    assert all(json.loads(line) for path in files for line in path.read_text().splitlines())
    assert other.exists()


def test_two_exporters_of_a_name_do_not_share_a_file(tmp_path: Path) -> None:
    exporters = [TraceFileExporter(tmp_path, "target") for _ in range(2)]
    for exporter in exporters:
        exporter.export([make_span()])
        exporter.shutdown()
    assert len(list(tmp_path.iterdir())) == 2


def test_failing_writes_are_counted_and_break_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    exporter = TraceFileExporter(tmp_path / "file" / "below", "target")
    assert exporter.export([make_span()]) is SpanExportResult.FAILURE
    assert exporter.num_failed_writes == 1
    exporter.shutdown()


def test_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_TRACE_DIR", "somewhere")
    assert default_trace_dir() == Path("somewhere")
    monkeypatch.delenv("SPECDEC_TRACE_DIR")
    assert default_trace_dir().parts[-2:] == ("specdec", "traces")
