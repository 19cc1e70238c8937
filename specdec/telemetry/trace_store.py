"""Reads traces back from files.

The files are those of `specdec.telemetry.trace_file`. A trace is spread over
the files of three services. Steps belong to no request; those that link to a
span of a trace are read with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.telemetry import names

_SERVER_KIND = 2
_STATUS_ERROR = 2


class TraceNotFoundError(LookupError):
    """No trace, or more than one, fits what was asked for."""


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """One span, as read from a file."""

    service: str
    """Name of its service."""

    resource: dict[str, Any]
    """Its resource, in OTLP/JSON."""

    encoded: dict[str, Any]
    """The span itself, in OTLP/JSON."""

    @property
    def trace_id(self) -> str:
        """32 hex digits."""
        return str(self.encoded["traceId"])

    @property
    def span_id(self) -> str:
        """16 hex digits."""
        return str(self.encoded["spanId"])

    @property
    def parent_id(self) -> str:
        """Span id of its parent; "" for a root."""
        return str(self.encoded.get("parentSpanId", ""))

    @property
    def name(self) -> str:
        """One of `specdec.telemetry.names`."""
        return str(self.encoded["name"])

    @property
    def start_ns(self) -> int:
        """When it started, in ns since the epoch."""
        return int(self.encoded["startTimeUnixNano"])

    @property
    def end_ns(self) -> int:
        """When it ended, in ns since the epoch."""
        return int(self.encoded["endTimeUnixNano"])

    @property
    def attributes(self) -> dict[str, Any]:
        """Its attributes, decoded."""
        return _decode_attributes(self.encoded.get("attributes", []))

    @property
    def linked_span_ids(self) -> list[tuple[str, str]]:
        """Trace and span ids it links to."""
        return [(link["traceId"], link["spanId"]) for link in self.encoded.get("links", [])]

    @property
    def is_error(self) -> bool:
        """Whether its status is an error."""
        return bool(self.encoded.get("status", {}).get("code") == _STATUS_ERROR)

    @property
    def is_generate(self) -> bool:
        """Whether it is the server span of a Generate call."""
        return self.name == names.GENERATE and self.encoded.get("kind") == _SERVER_KIND


@dataclass(frozen=True, slots=True)
class Trace:
    """One request's spans, of all services."""

    trace_id: str
    """32 hex digits."""

    spans: list[StoredSpan]
    """Its spans, by start."""

    steps: list[StoredSpan]
    """Spans of other traces that link to it, by start."""


def list_requests(trace_dir: Path) -> list[StoredSpan]:
    """The Generate server spans of all traces.

    Args:
        trace_dir: Folder of the files; it may be missing.

    Returns:
        The spans, latest start first.
    """
    spans = [span for span in _read_spans(trace_dir, names.GENERATE) if span.is_generate]
    return sorted(spans, key=lambda span: span.start_ns, reverse=True)


def load_trace(trace_dir: Path, trace_id: str) -> Trace:
    """Reads one trace; TraceNotFoundError when nothing fits, or several traces do.

    Args:
        trace_dir: Folder of the files.
        trace_id: Its id, the first digits of it, or `last` for the Generate
            call that started last.

    Returns:
        The trace, with the steps that served it.
    """
    trace_id = _resolve(trace_dir, trace_id.lower())
    spans, steps = [], []
    # A line names the trace whether its spans belong to it or link to it.
    for span in _read_spans(trace_dir, trace_id):
        if span.trace_id == trace_id:
            spans.append(span)
        elif any(linked == trace_id for linked, _ in span.linked_span_ids):
            steps.append(span)
    spans.sort(key=lambda span: span.start_ns)
    steps.sort(key=lambda span: span.start_ns)
    return Trace(trace_id, spans, steps)


def write_jaeger_json(trace: Trace, path: Path) -> None:
    """Writes one OTLP/JSON object, for Jaeger's "upload JSON file".

    Args:
        trace: The trace; its steps are written too.
        path: The file; an existing one is replaced.
    """
    resource_spans = []
    for span in (*trace.spans, *trace.steps):
        scope_spans = [{"scope": {"name": "specdec"}, "spans": [span.encoded]}]
        resource_spans.append({"resource": span.resource, "scopeSpans": scope_spans})
    path.write_text(json.dumps({"resourceSpans": resource_spans}), encoding="utf-8")


def _resolve(trace_dir: Path, trace_id: str) -> str:
    if trace_id == "last":
        requests = list_requests(trace_dir)
        if not requests:
            raise TraceNotFoundError(f"no traces in {trace_dir}")
        return requests[0].trace_id
    found = {
        span.trace_id
        for span in _read_spans(trace_dir, trace_id)
        if span.trace_id.startswith(trace_id)
    }
    if not found or not trace_id:
        raise TraceNotFoundError(f"no trace {trace_id!r} in {trace_dir}")
    if len(found) > 1:
        raise TraceNotFoundError(f"{len(found)} traces start with {trace_id}: give more digits")
    return found.pop()


def _read_spans(trace_dir: Path, needle: str) -> Iterator[StoredSpan]:
    """Spans of the lines that contain the needle: parsing all would be slow."""
    for path in sorted(trace_dir.glob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if needle in line:
                    yield from _decode_line(line)


def _decode_line(line: str) -> Iterator[StoredSpan]:
    try:
        export = json.loads(line)
    except ValueError:  # Being written, or its writer was killed.
        return
    for resource_spans in export["resourceSpans"]:
        resource = resource_spans["resource"]
        service = _decode_attributes(resource["attributes"]).get("service.name", "")
        for scope_spans in resource_spans["scopeSpans"]:
            for span in scope_spans["spans"]:
                yield StoredSpan(service, resource, span)


def _decode_attributes(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {item["key"]: _decode_value(item["value"]) for item in attributes}


def _decode_value(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "intValue":
        return int(content)
    if kind == "arrayValue":
        return [_decode_value(item) for item in content["values"]]
    return content
