"""The interceptors on handlers of every arity and style."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from specdec.errors import InvalidArgumentError
from specdec.rpc.channel import open_channel
from tests.specdec.rpc.fake_orchestrator import MAX_MESSAGE_BYTES, Service, running_service

STYLES = "test.Styles"
TARGET = "specdec.v1.TargetService"


def checked(request: bytes) -> bytes:
    if request == b"bad":
        raise InvalidArgumentError("request", "is bad")
    return request


async def unary_unary(request: bytes, context: Any) -> bytes:
    return checked(request)


async def stream_unary(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return b"".join([checked(request) async for request in requests])


async def unary_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield checked(request)


async def stream_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield checked(request)


async def unary_stream_written(request: bytes, context: Any) -> None:
    await context.write(checked(request))


async def stream_stream_written(_: Any, context: Any) -> None:
    while (request := await context.read()) is not grpc.aio.EOF:
        await context.write(checked(request))


METHODS = {
    "UnaryUnary": grpc.unary_unary_rpc_method_handler(unary_unary),
    "StreamUnary": grpc.stream_unary_rpc_method_handler(stream_unary),
    "UnaryStream": grpc.unary_stream_rpc_method_handler(unary_stream),
    "StreamStream": grpc.stream_stream_rpc_method_handler(stream_stream),
    "UnaryStreamWritten": grpc.unary_stream_rpc_method_handler(unary_stream_written),
    "StreamStreamWritten": grpc.stream_stream_rpc_method_handler(stream_stream_written),
}


async def start_service(service: Service) -> str:
    handlers = [
        grpc.method_handlers_generic_handler(STYLES, METHODS),
        grpc.method_handlers_generic_handler(TARGET, {"Verify": METHODS["StreamStream"]}),
    ]
    service.server.add(lambda server: server.add_generic_rpc_handlers(handlers))
    return f"127.0.0.1:{await service.server.start()}"


async def call(address: str, method: str, requests: list[bytes]) -> bytes:
    """Calls any arity; returns the joined responses."""
    async with open_channel(address, MAX_MESSAGE_BYTES) as channel:
        name = method.rpartition("/")[2]
        handler = METHODS.get(name, METHODS["StreamStream"])
        request: Any = iter(requests) if handler.request_streaming else requests[0]
        if handler.response_streaming:
            make: Any = channel.stream_stream if handler.request_streaming else channel.unary_stream
            return b"".join([response async for response in make(method)(request)])
        make = channel.stream_unary if handler.request_streaming else channel.unary_unary
        return bytes(await make(method)(request))


@pytest.mark.parametrize("name", METHODS)
async def test_every_style_answers_fails_and_is_traced_alike(name: str) -> None:
    service = Service(traced=True)
    address = await start_service(service)
    method = f"/{STYLES}/{name}"
    assert await call(address, method, [b"good"]) == b"good"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(address, method, [b"bad"])
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.details() == "request: is bad"
    await service.idle()
    assert [len(span.events) for span in service.spans(method[1:])] == [0, 1]
    await service.server.stop(0)
    service.tracing.shutdown()


async def test_long_lived_streams_between_services_get_no_span() -> None:
    service = Service(traced=True)
    address = await start_service(service)
    assert await call(address, f"/{TARGET}/Verify", [b"a", b"b"]) == b"ab"
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call(address, f"/{TARGET}/Verify", [b"bad"])
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await service.idle()
    assert not service.spans(f"{TARGET}/Verify")
    await service.server.stop(0)
    service.tracing.shutdown()


async def test_unknown_methods_are_unimplemented() -> None:
    async with running_service() as service:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(service.address, "/test.Nobody/Home", [b"good"])
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
