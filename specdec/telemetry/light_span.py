"""A span that costs a few microseconds: for the parts of a round, and for steps.

The SDK's span takes a sampler's decision, bounds and cleans every attribute and
locks itself, some 20 us in all, and a round has five. A part of a round follows
its parent's sampling, has a handful of attributes of known size, and is used by
one thread at a time. Once it has ended, the export thread makes the same ReadableSpan
of it as of any other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import Attributes, AttributeValue

_UNSET = Status()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class LightSpan(Span):
    """A recording span: the child of a sampled parent, or the root of its own trace."""

    __slots__ = (
        "_attributes",
        "_context",
        "_end_time_ns",
        "_events",
        "_links",
        "_name",
        "_on_end",
        "_parent",
        "_resource",
        "_scope",
        "_start_time_ns",
        "_status",
    )

    def __init__(
        self,
        name: str,
        parent: SpanContext | None,
        *,
        resource: Resource,
        scope: InstrumentationScope,
        attributes: Mapping[str, AttributeValue] | None,
        links: Sequence[Link],
        start_time_ns: int | None,
        on_end: Callable[[LightSpan], None],
    ) -> None:
        """Starts the span.

        Args:
            name: Its name.
            parent: What it is a part of, valid and sampled; None: nothing.
            resource: The service.
            scope: The library.
            attributes: Its first attributes; None for none.
            links: Spans of other traces.
            start_time_ns: In ns since the epoch; None is now.
            on_end: Takes the ended span.
        """
        self._name = name
        self._parent = parent
        self._context = SpanContext(
            (random.getrandbits(128) or 1) if parent is None else parent.trace_id,
            random.getrandbits(64) or 1,
            is_remote=False,
            trace_flags=_SAMPLED if parent is None else parent.trace_flags,
            trace_state=None if parent is None else parent.trace_state,
        )
        self._resource = resource
        self._scope = scope
        self._attributes: dict[str, AttributeValue] = dict(attributes or {})
        self._links = links
        self._events: list[Event] = []
        self._status = _UNSET
        self._on_end: Callable[[LightSpan], None] | None = on_end
        self._end_time_ns = 0
        self._start_time_ns = time.time_ns() if start_time_ns is None else start_time_ns

    def end(self, end_time: int | None = None) -> None:
        """Ends the span; a second call does nothing."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            self._end_time_ns = time.time_ns() if end_time is None else end_time
            on_end(self)

    def to_readable(self) -> ReadableSpan:
        """The ended span as the SDK's kind, made where it is exported."""
        return ReadableSpan(
            name=self._name,
            context=self._context,
            parent=self._parent,
            resource=self._resource,
            attributes=self._attributes,
            events=self._events,
            links=self._links,
            kind=SpanKind.INTERNAL,
            status=self._status,
            start_time=self._start_time_ns,
            end_time=self._end_time_ns,
            instrumentation_scope=self._scope,
        )

    def get_span_context(self) -> SpanContext:
        """Its ids."""
        return self._context

    @property
    def context(self) -> SpanContext:
        """Its ids, under the name by which the SDK's processors ask for them."""
        return self._context

    @property
    def parent(self) -> SpanContext | None:
        """Its parent's ids."""
        return self._parent

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Sets one attribute."""
        self._attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Sets several attributes."""
        self._attributes.update(attributes)

    def add_event(
        self, name: str, attributes: Attributes = None, timestamp: int | None = None
    ) -> None:
        """Adds an event."""
        self._events.append(Event(name, attributes, timestamp))

    def update_name(self, name: str) -> None:
        """Renames the span."""
        self._name = name

    def is_recording(self) -> bool:
        """Whether it has not ended."""
        return self._on_end is not None

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Sets how it went."""
        self._status = status if isinstance(status, Status) else Status(status, description)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Adds an exception event; its message may quote a prompt and is left out."""
        details: dict[str, AttributeValue] = {
            "exception.type": type(exception).__qualname__,
            "exception.escaped": escaped,
        }
        self.add_event("exception", {**details, **(attributes or {})}, timestamp)
