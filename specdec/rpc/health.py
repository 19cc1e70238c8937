"""The grpc.health.v1 service, and waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from specdec.rpc.channel import open_channel

_Status: TypeAlias = "health_pb2.HealthCheckResponse.ServingStatus"
_MAX_MESSAGE_BYTES = 1024 * 1024
_RETRY_S = 0.1


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """One status for the whole process, under "" and each service's name.

    Unlike the servicer of grpcio-health-checking, it ends its Watch streams
    when it closes: they would otherwise hold a stopping server for its whole
    grace period.
    """

    def __init__(self, service_names: Iterable[str]) -> None:
        """Starts as NOT_SERVING."""
        self._names = frozenset({"", *service_names})
        self._is_serving = False
        self._is_closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Sets the status and tells the watchers."""
        self._is_serving = serving
        self._notify()

    def close(self) -> None:
        """Sets NOT_SERVING for good, tells the watchers and lets them go."""
        self._is_closed = True
        self._notify()

    def _notify(self) -> None:
        # Whoever waits keeps the old event; later ones wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, name: str) -> _Status:
        if name not in self._names:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if self._is_serving and not self._is_closed:
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING

    async def Check(self, request: Any, context: Any) -> Any:
        """Says the status of one name; NOT_FOUND for an unknown one."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service: {request.service}")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def List(self, request: Any, context: Any) -> Any:
        """Says the status of every name."""
        response = health_pb2.HealthListResponse()
        for name in self._names:
            response.statuses[name].status = self._status(name)
        return response

    async def Watch(self, request: Any, context: Any) -> None:
        """Says the status of one name now and after each change."""
        sent = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != sent:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                sent = status
            elif self._is_closed:
                return
            else:
                await changed.wait()


async def wait_serving(address: str, timeout_s: float) -> None:
    """Waits until a server says that it serves.

    Args:
        address: HOST:PORT.
        timeout_s: Longest wait, in s.

    Raises:
        TimeoutError: Naming the address, when the time is up.
    """
    try:
        async with asyncio.timeout(timeout_s), open_channel(address, _MAX_MESSAGE_BYTES) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                if await _is_serving(stub):
                    return
                await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise TimeoutError(f"{address} did not serve within {timeout_s:g} s") from None


async def _is_serving(stub: Any) -> bool:
    try:
        response = await stub.Check(health_pb2.HealthCheckRequest())
    except grpc.aio.AioRpcError:
        return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)
