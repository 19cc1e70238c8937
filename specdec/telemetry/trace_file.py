"""Spans as files, for machines without a collector.

A file holds OTLP/JSON lines: each line is one export, an object with
`resourceSpans`. Ids are hex and times are decimal strings of nanoseconds, as
OTLP/JSON demands; protobuf's own JSON mapping would write ids in base64.

Jaeger's "upload JSON file" takes OTLP/JSON since 1.55: first as one object or
an array of them, later as lines of them too (jaeger-ui #2380), and from files
named .jsonl (#2461). `specdec trace export` writes one object in a .json file,
which all of these versions take.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import orjson
import platformdirs
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Link

MAX_FILE_BYTES = 16 * 1024 * 1024
# With the limit above: at most 64 MiB per service and folder.
MAX_FILES = 4
_SUFFIX = ".jsonl"


def default_trace_dir() -> Path:
    """SPECDEC_TRACE_DIR, else `traces` in the user's state folder."""
    folder = os.environ.get("SPECDEC_TRACE_DIR")
    return Path(folder) if folder else platformdirs.user_state_path("specdec") / "traces"


class TraceFileExporter(SpanExporter):
    """Appends spans to `<folder>/<service>-<pid>-<n>.jsonl`.

    A full file is followed by a new one, and the oldest files of the service
    are deleted. A failing write loses its spans and is counted, no more.
    """

    def __init__(self, folder: Path, service_name: str, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Creates nothing yet: the first export does.

        Args:
            folder: Where the files go.
            service_name: Their names' first part.
            max_bytes: Size at which a file is full, in bytes.
        """
        self.num_failed_writes = 0
        self._folder = folder
        self._service_name = service_name.replace(os.sep, "_")
        self._max_bytes = max_bytes
        self._file: IO[bytes] | None = None
        # A flush and the export thread may both write.
        self._lock = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Writes one line.

        Args:
            spans: Ended spans of this service.

        Returns:
            Whether they were written.
        """
        try:
            line = encode_spans(spans)
            with self._lock:
                file = self._writable_file()
                file.write(line)
                file.flush()
        except OSError:
            self.num_failed_writes += 1
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _writable_file(self) -> IO[bytes]:
        if self._file is not None and self._file.tell() >= self._max_bytes:
            self._file.close()
            self._file = None
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = self._create_file()
            self._delete_old_files()
        return self._file

    def _create_file(self) -> IO[bytes]:
        """Opens the next unused name: two services of a name may share a process."""
        number = 0
        while True:
            name = f"{self._service_name}-{os.getpid()}-{number}{_SUFFIX}"
            try:
                return (self._folder / name).open("xb")
            except FileExistsError:
                number += 1

    def _delete_old_files(self) -> None:
        files = self._folder.glob(f"{self._service_name}-*{_SUFFIX}")
        for path in sorted(files, key=_modified, reverse=True)[MAX_FILES:]:
            path.unlink(missing_ok=True)


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # Another process tidied up first.
        return 0


def encode_spans(spans: Sequence[ReadableSpan]) -> bytes:
    """One line of OTLP/JSON.

    Args:
        spans: Spans of one resource; at least one.

    Returns:
        The line, with its end.
    """
    encoded = []
    for span in spans:
        encoded.append(orjson.dumps(_encode_span(span)))
        # Else this thread kept the interpreter lock for milliseconds, and rounds waited.
        time.sleep(0)
    resource = orjson.dumps({"attributes": _encode_attributes(spans[0].resource.attributes)})
    return (
        b'{"resourceSpans":[{"resource":%b,"scopeSpans":[{"scope":{"name":"specdec"},"spans":[%b]}]}]}\n'
        % (resource, b",".join(encoded))
    )


def _encode_span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    encoded: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,  # OTLP counts from unspecified.
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _encode_attributes(span.attributes),
    }
    if span.parent is not None:
        encoded["parentSpanId"] = f"{span.parent.span_id:016x}"
    if span.links:
        encoded["links"] = [_encode_link(link) for link in span.links]
    if span.events:
        encoded["events"] = [_encode_event(event) for event in span.events]
    if span.dropped_links:
        encoded["droppedLinksCount"] = span.dropped_links
    if not span.status.is_unset:
        encoded["status"] = {"code": span.status.status_code.value}
        if span.status.description:
            encoded["status"]["message"] = span.status.description
    return encoded


def _encode_link(link: Link) -> dict[str, Any]:
    return {
        "traceId": f"{link.context.trace_id:032x}",
        "spanId": f"{link.context.span_id:016x}",
        "attributes": _encode_attributes(link.attributes),
    }


def _encode_event(event: Event) -> dict[str, Any]:
    return {
        "timeUnixNano": str(event.timestamp),
        "name": event.name,
        "attributes": _encode_attributes(event.attributes),
    }


def _encode_attributes(attributes: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": _encode_value(value)} for key, value in (attributes or {}).items()
    ]


def _encode_value(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):  # Before int, whose subclass it is.
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, Iterable):
        return {"arrayValue": {"values": [_encode_value(item) for item in value]}}
    return {"stringValue": str(value)}
