"""The gRPC server of one service, with health and reflection."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection as grpc_reflection  # type: ignore[import-untyped]

from specdec.rpc.channel import MIN_PING_INTERVAL_MS, Options, channel_options
from specdec.rpc.health import HealthServicer

# Each Generate is a stream, and calls past the limit wait unseen at the
# client: high enough that our own admission refuses first, and visibly.
MAX_CONCURRENT_STREAMS = 4096


class PortInUseError(OSError):
    """Another process listens on the address."""


class GrpcServer:
    """A grpc.aio server; to be made and used inside a running event loop."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        service_names: Sequence[str],
        reflection: bool,
        max_message_bytes: int,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        """Binds nothing yet.

        Args:
            host: Address to listen on.
            port: TCP port to listen on; 0 picks a free one.
            service_names: Full names of the services, for health and reflection.
            reflection: Whether reflection is offered.
            max_message_bytes: Largest message sent or received, in bytes.
            interceptors: Outermost first.
        """
        self._host = f"[{host}]" if ":" in host else host
        self._port = port
        self._server = grpc.aio.server(
            interceptors=list(interceptors), options=server_options(max_message_bytes)
        )
        self._health = HealthServicer(service_names)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if reflection:
            self._add_reflection(service_names)

    def _add_reflection(self, service_names: Sequence[str]) -> None:
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (*service_names, health_name, grpc_reflection.SERVICE_NAME)
        grpc_reflection.enable_server_reflection(names, self._server)

    def add(self, register: Callable[[grpc.aio.Server], None]) -> None:
        """Adds a servicer, before the start.

        Args:
            register: Registers it with the server it is given, such as
                `lambda server: add_TargetServiceServicer_to_server(servicer, server)`.
        """
        register(self._server)

    async def start(self) -> int:
        """Listens; health stays NOT_SERVING until `set_serving(True)`.

        Returns:
            The bound port.

        Raises:
            PortInUseError: Naming host and port.
        """
        address = f"{self._host}:{self._port}"
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise PortInUseError(f"cannot listen on {address}: {error}") from None
        await self._server.start()
        return port

    def set_serving(self, serving: bool) -> None:
        """Sets what health says, for all services; to be called on the event loop."""
        self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Stops: health says NOT_SERVING, new calls are refused, running ones may end.

        Args:
            grace_s: How long running calls may take to end, in s; those left
                are cancelled.
        """
        self._health.close()
        await self._server.stop(grace_s)

    async def wait_for_termination(self) -> None:
        """Waits until the server has stopped."""
        await self._server.wait_for_termination()


def server_options(max_message_bytes: int) -> Options:
    """Options of a server, which permit what `channel_options` makes clients do.

    Args:
        max_message_bytes: Largest message sent or received, in bytes.

    Returns:
        The options, as grpc takes them.
    """
    return (
        *channel_options(max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        # Else a second server on a taken port would start and share its calls.
        ("grpc.so_reuseport", 0),
    )
