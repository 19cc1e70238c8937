from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specdec.rpc import channel as channel_module
from specdec.rpc import server as server_module
from specdec.rpc.channel import channel_options, open_channel
from specdec.rpc.health import wait_serving
from specdec.rpc.server import GrpcServer, PortInUseError, server_options
from tests.specdec.rpc.fake_orchestrator import (
    MAX_MESSAGE_BYTES,
    SERVICE,
    generate_request,
    open_stub,
    running_service,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def make_server(port: int = 0, reflection: bool = True) -> GrpcServer:
    return GrpcServer(
        host="127.0.0.1",
        port=port,
        service_names=[SERVICE],
        reflection=reflection,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )


async def status_of(stub: Any, name: str) -> int:
    response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    return int(response.status)


async def test_health_follows_the_life_of_the_service() -> None:
    server = make_server()
    address = f"127.0.0.1:{await server.start()}"
    async with open_channel(address, MAX_MESSAGE_BYTES) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert (await unknown.read()).status == SERVICE_UNKNOWN
        for name in ("", SERVICE):
            assert await status_of(stub, name) == NOT_SERVING
        assert (await watch.read()).status == NOT_SERVING
        server.set_serving(True)
        for name in ("", SERVICE):
            assert await status_of(stub, name) == SERVING
        assert (await watch.read()).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await status_of(stub, "nobody")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        listed = (await stub.List(health_pb2.HealthListRequest())).statuses
        assert {name: entry.status for name, entry in listed.items()} == {
            "": SERVING,
            SERVICE: SERVING,
        }

        start = time.monotonic()
        await server.stop(grace_s=10)
        assert time.monotonic() - start < 2, "open Watch streams must not use up the grace"
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_stop_lets_running_calls_end_and_cancels_those_that_do_not() -> None:
    async with running_service() as service, open_stub(service) as stub:
        call = stub.Generate(generate_request("hang"))
        await call.read()
        start = time.monotonic()
        await service.server.stop(grace_s=0.3)
        assert 0.2 < time.monotonic() - start < 2
        await service.idle()
        assert service.servicer.num_cleanups == 1


@pytest.mark.parametrize("offered", [True, False])
async def test_reflection_lists_every_service_unless_switched_off(offered: bool) -> None:
    server = make_server(reflection=offered)
    address = f"127.0.0.1:{await server.start()}"
    async with open_channel(address, MAX_MESSAGE_BYTES) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        if offered:
            listed = (await call.read()).list_services_response.service
            assert {service.name for service in listed} >= {SERVICE, "grpc.health.v1.Health"}
        else:
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(0)


async def test_taken_port_is_named() -> None:
    first = make_server()
    port = await first.start()
    with pytest.raises(PortInUseError, match=rf"127\.0\.0\.1:{port}"):
        await make_server(port).start()
    await first.stop(0)


def test_keepalive_of_clients_is_permitted_by_servers() -> None:
    client, server = dict(channel_options(1)), dict(server_options(1))
    ping_interval_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] >= 2 * ping_interval_ms
    for options in (client, server):
        assert options["grpc.keepalive_permit_without_calls"] == 1
        assert options["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.so_reuseport"] == 0


async def test_frequent_pings_on_an_idle_channel_do_not_cut_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The ratio of the real settings, sped up, on a server that forgives one ping too many.
    monkeypatch.setattr(channel_module, "KEEPALIVE_TIME_MS", 1_000)
    monkeypatch.setattr(server_module, "MIN_PING_INTERVAL_MS", 333)

    def strict_options(max_message_bytes: int) -> channel_module.Options:
        return (*server_options(max_message_bytes), ("grpc.http2.max_ping_strikes", 1))

    monkeypatch.setattr(server_module, "server_options", strict_options)
    async with running_service() as service, open_stub(service) as stub:
        stream = stub.Generate(generate_request("hang"))
        # Both messages: with one left unread, the client would not ping.
        await stream.read()
        await stream.read()
        await asyncio.sleep(3.5)
        assert not stream.done()
        assert len([response async for response in stub.Generate(generate_request())]) == 2
        stream.cancel()


async def test_many_streams_share_a_channel() -> None:
    async with running_service() as service, open_stub(service) as stub:
        calls = [stub.Generate(generate_request("hang")) for _ in range(150)]
        async with asyncio.timeout(5):
            for call in calls:
                await call.read()
        assert service.active.num_active == 150
        health = health_pb2_grpc.HealthStub
        async with open_channel(service.address, MAX_MESSAGE_BYTES) as channel:
            assert await status_of(health(channel), "") == SERVING
        for call in calls:
            call.cancel()
        await service.idle()


async def test_probes_are_neither_counted_nor_traced() -> None:
    async with running_service() as service:
        async with open_channel(service.address, MAX_MESSAGE_BYTES) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            for _ in range(20):
                await status_of(stub, "")
            assert service.active.num_active == 0
            assert service.tracing.num_open_spans == 0
            watch.cancel()
        service.tracing.flush()
        assert not service.spans("grpc.health.v1.Health/Check")


async def test_wait_serving_waits_for_serving() -> None:
    server = make_server()
    address = f"127.0.0.1:{await server.start()}"
    with pytest.raises(TimeoutError, match=address):
        await wait_serving(address, 0.3)
    waiting = asyncio.create_task(wait_serving(address, 5))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    server.set_serving(True)
    await waiting
    await server.stop(0)
