"""What every RPC goes through: counting, tracing, errors.

Own interceptors, because OpenTelemetry's for grpc.aio await the call inside
the interceptor, which breaks cancelling, and end a stream's span too early.
Servers list them outermost first: ActiveRpc, Tracing, Error.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, cast

import grpc
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode

from specdec.errors import InternalError, ServiceError
from specdec.rpc.errors import status_code_of, to_status
from specdec.rpc.handlers import Behaviour, Context, Handler, is_probe, wrap_handler
from specdec.telemetry import names
from specdec.telemetry.tracing import MAX_ATTRIBUTE_LENGTH, Tracing

_logger = logging.getLogger(__name__)
_current_span: ContextVar[Span] = ContextVar("current_span", default=INVALID_SPAN)

_UNTRACED = (
    # Streams that live as long as the orchestrator: their items carry their context.
    "/specdec.v1.TargetService/Verify",
    "/specdec.v1.DraftService/Propose",
    # Asked every few seconds, for the load.
    "/specdec.v1.TargetService/GetTargetInfo",
    "/specdec.v1.DraftService/GetDraftInfo",
)

# OpenTelemetry's list for servers: the rest is the caller's doing.
_SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


def current_span() -> Span:
    """The server span of the RPC this task handles; an invalid span outside of one."""
    return _current_span.get()


class _Interceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all methods but health and reflection."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or is_probe(method):
            return handler
        return wrap_handler(handler, lambda behaviour: self._wrap(behaviour, method))

    @abstractmethod
    def _wrap(self, behaviour: Behaviour, method: str) -> Behaviour:
        """Makes the new behaviour of one call.

        Args:
            behaviour: The old one.
            method: Its name, `/package.Service/Method`.

        Returns:
            The new behaviour.
        """


class ActiveRpcInterceptor(_Interceptor):
    """Counts the calls in progress."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.num_active = 0

    def _wrap(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def counted(request: Any, context: Context) -> Any:
            self.num_active += 1
            try:
                return await behaviour(request, context)
            finally:
                self.num_active -= 1

        return counted


class ErrorInterceptor(_Interceptor):
    """Ends calls whose handlers raise with a status the caller can act on."""

    def _wrap(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def guarded(request: Any, context: Context) -> Any:
            try:
                return await behaviour(request, context)
            except (asyncio.CancelledError, grpc.aio.AbortError):
                raise
            except ServiceError as error:
                await _abort(context, error)
            except Exception as error:
                if context.cancelled():  # Writing to a caller who has left.
                    raise
                _logger.exception("%s failed", method)
                hidden = InternalError("internal error; see the service's log", reason="INTERNAL")
                # The cause is for the span, which is ended further out.
                hidden.__cause__ = error
                await _abort(context, hidden)

        return guarded


async def _abort(context: Context, error: ServiceError) -> None:
    """Aborts, keeping the trailing metadata that the handler has set."""
    status = to_status(error)
    trailing = (*(context.trailing_metadata() or ()), *(status.trailing_metadata or ()))
    await context.abort(status.code, status.details, trailing)


class TracingInterceptor(_Interceptor):
    """Gives each RPC a server span, open until its last response is written."""

    def __init__(self, tracing: Tracing) -> None:
        """Takes the tracing of the service."""
        self._tracing = tracing

    def _wrap(self, behaviour: Behaviour, method: str) -> Behaviour:
        if method in _UNTRACED:
            return behaviour

        async def traced(request: Any, context: Context) -> Any:
            span = _start_rpc_span(self._tracing, method, SpanKind.SERVER, _traceparent_in(context))
            token = _current_span.set(span)
            code = grpc.StatusCode.OK
            try:
                response = await behaviour(request, context)
                code = _code_set_by(context) or code
                return response
            except asyncio.CancelledError:
                code = _code_of_cancelled(context)
                raise
            except grpc.aio.AbortError as abort:
                code = _code_set_by(context) or grpc.StatusCode.UNKNOWN
                # The error interceptor aborts while it handles the true error.
                _record(span, _true_error(abort))
                raise
            except BaseException as error:
                if context.cancelled():  # Writing to a caller who has left.
                    code = _code_of_cancelled(context)
                else:
                    code = status_code_of(error)
                    _record(span, error)
                raise
            finally:
                _current_span.reset(token)
                _end_rpc_span(span, code, code in _SERVER_FAULTS)

        return traced


class _TracingClientInterceptor:
    """Gives each call a client span and sends its context.

    It never awaits the call: cancelling, failing and streaming are those of the
    bare call, and a callback ends the span.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def _start_call(
        self, continuation: Any, details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        method = details.method
        method = method.decode() if isinstance(method, bytes) else method
        if is_probe(method) or method in _UNTRACED:
            return await continuation(details, request)
        span = _start_rpc_span(self._tracing, method, SpanKind.CLIENT, current_span())
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        traceparent = self._tracing.traceparent_of(span)
        if traceparent:
            metadata[names.TRACEPARENT] = traceparent
        details = grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )
        try:
            call = await continuation(details, request)
        except BaseException:
            _end_rpc_span(span, grpc.StatusCode.CANCELLED, is_error=False)
            raise
        call.add_done_callback(lambda call: _end_client_span(span, call))
        return call


class _UnaryUnary(_TracingClientInterceptor, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await self._start_call(continuation, client_call_details, request)


class _UnaryStream(_TracingClientInterceptor, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        return await self._start_call(continuation, client_call_details, request)


def tracing_client_interceptors(tracing: Tracing) -> list[grpc.aio.ClientInterceptor]:
    """Interceptors that trace a channel's unary and server-streaming calls.

    Args:
        tracing: The tracing of the calling service.

    Returns:
        One for each arity: grpc.aio uses an object for the first it fits only.
    """
    return [_UnaryUnary(tracing), _UnaryStream(tracing)]


def _start_rpc_span(tracing: Tracing, method: str, kind: SpanKind, parent: Span | str) -> Span:
    name = method.lstrip("/")
    service, _, short_name = name.rpartition("/")
    return tracing.start_span(
        name,
        parent=parent,
        kind=kind,
        attributes={
            names.RPC_SYSTEM: "grpc",
            names.RPC_SERVICE: service,
            names.RPC_METHOD: short_name,
        },
    )


def _end_rpc_span(span: Span, code: grpc.StatusCode, is_error: bool) -> None:
    span.set_attribute(names.RPC_GRPC_STATUS_CODE, code.value[0])
    if is_error:
        span.set_status(StatusCode.ERROR, code.name)
    span.end()


def _end_client_span(span: Span, call: Any) -> None:
    code = grpc.StatusCode.UNKNOWN
    try:
        # The call is done, so this coroutine has nothing to wait for; awaiting
        # it would take a task that may outlive the loop.
        call.code().send(None)
    except StopIteration as result:
        code = result.value
    # Callers see every failure as one, except the cancelling they did themselves.
    _end_rpc_span(span, code, code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED))


def _traceparent_in(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == names.TRACEPARENT and isinstance(value, str):
            return value
    return ""


def _code_set_by(context: Context) -> grpc.StatusCode | None:
    """The status the handler set, or aborted with; None when it set none."""
    code = cast("grpc.StatusCode | int", context.code())
    for known in grpc.StatusCode:
        if known is code or (code and known.value[0] == code):
            return known
    return None


def _code_of_cancelled(context: Context) -> grpc.StatusCode:
    """A handler is cancelled alike when its caller leaves and when the time is up."""
    remaining_s = cast("float | None", context.time_remaining())
    if remaining_s is not None and remaining_s <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED


def _true_error(abort: grpc.aio.AbortError) -> BaseException:
    error: BaseException = abort
    while isinstance(error, (grpc.aio.AbortError, ServiceError)):
        deeper = error.__cause__ or error.__context__
        if deeper is None:
            break
        error = deeper
    return error


def _record(span: Span, error: BaseException) -> None:
    """Adds the one exception event.

    Only our own messages are kept: those of other exceptions may quote a prompt.
    """
    attributes = {names.EXCEPTION_TYPE: f"{type(error).__module__}.{type(error).__qualname__}"}
    if isinstance(error, ServiceError):
        attributes[names.EXCEPTION_MESSAGE] = error.message
    else:
        stack = "".join(traceback.format_tb(error.__traceback__))
        # Attributes are cut at their end, which is where the fault is.
        attributes[names.EXCEPTION_STACKTRACE] = stack[-MAX_ATTRIBUTE_LENGTH:]
    span.add_event("exception", attributes)
