"""RPC handlers as one kind of thing.

grpc.aio knows eight kinds of handlers: each side unary or streaming, and
responses either yielded or written. Interceptors here see one: a coroutine
function of the request (or the request iterator) and the context.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeAlias

import grpc

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Behaviour: TypeAlias = Callable[[Any, Context], Awaitable[Any]]

_PROBES = ("/grpc.health.", "/grpc.reflection.")


def is_probe(method: str) -> bool:
    """Whether it is a health or reflection method, which nobody counts or traces."""
    return method.startswith(_PROBES)


def wrap_handler(handler: Handler, wrap: Callable[[Behaviour], Behaviour]) -> Handler:
    """Wraps what a handler does.

    Args:
        handler: An async handler of any arity.
        wrap: Makes the new behaviour from the old one.

    Returns:
        A handler of the same arity.
    """
    arity = ("stream" if handler.request_streaming else "unary") + (
        "_stream" if handler.response_streaming else "_unary"
    )
    make: Callable[..., Handler] = getattr(grpc, f"{arity}_rpc_method_handler")
    behaviour = getattr(handler, arity)
    if inspect.isasyncgenfunction(behaviour):
        behaviour = _written(behaviour)
    return make(
        wrap(behaviour),
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _written(generate: Callable[[Any, Context], Any]) -> Behaviour:
    """Turns a handler that yields its responses into one that writes them.

    A write goes on while the handler makes the next response, but no further: a
    slow reader holds the handler up one response later.
    """

    async def behaviour(request: Any, context: Context) -> None:
        write: asyncio.Future[None] | None = None
        try:
            # Closed here, so that a cancelled call runs the handler's `finally` at
            # once; left to itself, grpc.aio leaves that to the garbage collector.
            async with aclosing(generate(request, context)) as responses:
                async for response in responses:
                    if write is not None:
                        await write
                    write = asyncio.ensure_future(context.write(response))
        except asyncio.CancelledError:
            if write is not None:
                write.cancel()
            raise
        except Exception:
            if write is not None:
                with suppress(Exception):  # what the handler raised is the cause
                    await write
            raise
        if write is not None:
            await write

    return behaviour
