"""Draws a trace as a waterfall.

Steps that served the trace are drawn below the span they link to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from specdec.telemetry import names
from specdec.telemetry.trace_store import (
    StoredSpan,
    Trace,
    TraceNotFoundError,
    list_requests,
    load_trace,
    write_jaeger_json,
)

__all__ = [
    "StoredSpan",
    "Trace",
    "TraceNotFoundError",
    "list_requests",
    "load_trace",
    "render_waterfall",
    "write_jaeger_json",
]

# Rounds are alike: a few of each end tell the story.
NUM_FIRST_ROUNDS = 4
NUM_LAST_ROUNDS = 3
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue")


def render_waterfall(trace: Trace, width: int, *, full: bool = False) -> Table:
    """Draws a trace as a tree with a time line.

    Args:
        trace: The trace; not empty.
        width: Columns to use.
        full: Draws every round, instead of the first and last few.

    Returns:
        Something for rich to print.
    """
    start_ns = trace.spans[0].start_ns
    end_ns = max(span.end_ns for span in trace.spans)
    services = list(dict.fromkeys(span.service for span in (*trace.spans, *trace.steps)))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(services)}
    bar_width = max(6, (width - 70) // 2)
    table = Table(box=None, width=width, pad_edge=False, header_style="dim")
    table.add_column("span", no_wrap=True, overflow="ellipsis")
    table.add_column("service", no_wrap=True, min_width=max(map(len, services)))
    table.add_column("at ms", justify="right", no_wrap=True, min_width=6)
    table.add_column("ms", justify="right", no_wrap=True, min_width=6)
    table.add_column("", width=bar_width, no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis")
    for row in _rows(trace, full):
        if row.span is None:
            table.add_row(Text(row.label, style="dim"))
            continue
        span, colour = row.span, colours[row.span.service]
        table.add_row(
            Text(row.label, style="red" if span.is_error else ""),
            Text(span.service, style=colour),
            f"{(span.start_ns - start_ns) / 1e6:.1f}",
            f"{(span.end_ns - span.start_ns) / 1e6:.1f}",
            Text(_bar(span, start_ns, end_ns, bar_width), style=colour),
            Text(_summary(span), style="dim"),
        )
    return table


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    span: StoredSpan | None


def _rows(trace: Trace, full: bool) -> Iterator[_Row]:
    """The tree, depth first; a row without a span tells what is left out."""
    children: dict[str, list[StoredSpan]] = {}
    known = {span.span_id for span in trace.spans}
    for span in trace.spans:
        # A parent that is not ours (the caller's, or lost) leaves a root.
        children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
    for step in trace.steps:
        for trace_id, span_id in step.linked_span_ids:
            if trace_id == trace.trace_id:
                children.setdefault(span_id, []).append(step)

    def descend(span_id: str, depth: int) -> Iterator[_Row]:
        spans = sorted(children.get(span_id, ()), key=lambda span: span.start_ns)
        hidden = set() if full else _hidden_rounds(spans)
        is_told = False
        for span in spans:
            if span.attributes.get(names.ROUND_INDEX) in hidden:
                if not is_told:
                    is_told = True
                    label = f"{'  ' * depth}… {len(hidden)} rounds left out"
                    yield _Row(label, None)
                continue
            is_step = span.trace_id != trace.trace_id
            # RPCs are named package.Service/Method.
            name = span.name.rpartition("/")[2]
            yield _Row("  " * depth + ("↔ " if is_step else "") + name, span)
            if not is_step:
                yield from descend(span.span_id, depth + 1)

    yield from descend("", 0)


def _hidden_rounds(spans: list[StoredSpan]) -> set[int]:
    indices = sorted({span.attributes.get(names.ROUND_INDEX, -1) for span in spans} - {-1})
    # Hiding a single round would save nothing.
    if len(indices) <= NUM_FIRST_ROUNDS + NUM_LAST_ROUNDS + 1:
        return set()
    return set(indices[NUM_FIRST_ROUNDS:-NUM_LAST_ROUNDS])


def _bar(span: StoredSpan, start_ns: int, end_ns: int, width: int) -> str:
    scale = width / max(1, end_ns - start_ns)
    # A step may begin before the trace and end after it.
    first = min(width - 1, max(0, int((span.start_ns - start_ns) * scale)))
    last = min(width, max(first + 1, round((span.end_ns - start_ns) * scale)))
    return " " * first + "━" * (last - first)


def _summary(span: StoredSpan) -> str:
    """The attributes that tell how drafting and batching went."""
    attributes = span.attributes
    drafted, accepted = names.NUM_DRAFT_TOKENS, names.NUM_ACCEPTED_TOKENS
    parts = []
    if names.ROUND_INDEX in attributes:
        parts.append(f"round {attributes[names.ROUND_INDEX]}")
    if drafted in attributes and accepted in attributes:
        parts.append(f"{attributes[accepted]}/{attributes[drafted]} accepted")
    elif drafted in attributes:
        parts.append(f"{attributes[drafted]} drafted")
    if names.BATCH_SIZE in attributes:
        parts.append(f"batch {attributes[names.BATCH_SIZE]}")
    if names.NUM_TOKENS in attributes:
        parts.append(f"{attributes[names.NUM_TOKENS]} tokens")
    if names.FALLBACK_REASON in attributes:
        parts.append(str(attributes[names.FALLBACK_REASON]))
    return ", ".join(parts)
