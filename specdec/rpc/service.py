"""What a service is made of, and how it starts and ends."""

from __future__ import annotations

import asyncio
import gc
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar

import structlog
from prometheus_client.metrics_core import Metric

from specdec.rpc.interceptors import ActiveRpcInterceptor, ErrorInterceptor, TracingInterceptor
from specdec.rpc.lifecycle import load_or_stop, run_service
from specdec.rpc.server import GrpcServer
from specdec.settings import ServiceSettings
from specdec.telemetry.logging import setup_logging
from specdec.telemetry.metrics import MetricsServer, counter, gauge
from specdec.telemetry.tracing import setup_tracing

_log = structlog.get_logger(__name__)


class StartError(Exception):
    """The service cannot start; the message says why, for people."""


class Service(ABC):
    """A service: listens, loads, serves, drains.

    It listens before it loads, so that a taken port is told at once and health
    says NOT_SERVING meanwhile.
    """

    name: ClassVar[str]
    """The service's name in traces and logs."""
    service_names: ClassVar[tuple[str, ...]]
    """Full names of the gRPC services it offers."""

    def __init__(self, settings: ServiceSettings) -> None:
        """Starts nothing yet."""
        self._common = settings
        self.tracing = setup_tracing(self.name, settings.trace_dir)
        self.active_rpcs = ActiveRpcInterceptor()
        self.metrics = MetricsServer()
        self.address = ""
        self.metrics_port: int | None = None
        self._is_loaded = False

    @abstractmethod
    def register(self, server: GrpcServer) -> None:
        """Adds the servicers, which refuse calls until the service is up."""

    @abstractmethod
    def load(self) -> None:
        """Loads what takes long; blocking, on a thread of its own.

        Raises:
            StartError: If the service cannot start.
        """

    @abstractmethod
    async def begin(self) -> None:
        """Makes the servicers serve what was loaded.

        Raises:
            StartError: If the service cannot start.
        """

    @abstractmethod
    async def drain(self) -> None:
        """Refuses new work; what runs may go on until the grace is over."""

    @abstractmethod
    async def close(self) -> None:
        """Frees what was loaded; no call runs any more."""

    async def start(self, stop: asyncio.Event | None = None) -> bool:
        """Brings the service up.

        Args:
            stop: Ends the start early when set.

        Returns:
            Whether it serves; False when `stop` came first.

        Raises:
            StartError: If the service cannot start.
            PortInUseError: If another process listens on the port.
        """
        stop = stop or asyncio.Event()
        self._server = GrpcServer(
            host=self._common.host,
            port=self._common.port,
            service_names=self.service_names,
            reflection=self._common.reflection,
            max_message_bytes=self._common.max_message_bytes,
            interceptors=[self.active_rpcs, TracingInterceptor(self.tracing), ErrorInterceptor()],
        )
        self.register(self._server)
        port = await self._server.start()
        self.address = f"{self._common.host}:{port}"
        self._serve_metrics()
        await load_or_stop(self._load, stop)
        if stop.is_set():
            await self._server.stop(0)
            return False
        beginning = asyncio.ensure_future(self.begin())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({beginning, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not beginning.done():
            beginning.cancel()
            await self._server.stop(0)
            return False
        beginning.result()
        self._server.set_serving(True)
        return True

    def _serve_metrics(self) -> None:
        port = self._common.metrics_port
        if port is None:
            return
        if self._common.port == 0 and "metrics_port" not in self._common.model_fields_set:
            port = 0  # free ports all round
        try:
            self.metrics_port = self.metrics.start(self._common.host, port)
        except OSError as error:
            raise StartError(f"metrics port {port}: {error.strerror or error}") from error

    def collect_metrics(self) -> Iterable[Metric]:
        """Reads what the service counts; at each scrape, once it is loaded."""
        return ()

    def _load(self) -> None:
        self.load()
        self.metrics.collect_from(self._collect)
        # What is loaded stays: collections need not walk through it again.
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        self._is_loaded = True

    def _collect(self) -> Iterable[Metric]:
        yield gauge("num_active_rpcs", "Calls with an open handler.", self.active_rpcs.num_active)
        yield counter(
            "dropped_spans", "Spans that were not exported.", self.tracing.num_dropped_spans
        )
        yield from self.collect_metrics()

    async def stop(self) -> None:
        """Drains within the grace, then frees everything; bounded.

        Also after a start that failed.
        """
        self._server.set_serving(False)
        await self.drain()
        await self._server.stop(self._common.drain_grace_ms / 1e3)
        if self._is_loaded:
            await self.close()
        await asyncio.to_thread(self.tracing.shutdown)
        await asyncio.to_thread(self.metrics.stop)

    async def __aenter__(self) -> Service:
        """Starts; what had begun is stopped when that fails."""
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stops."""
        await self.stop()

    async def run(self, stop: asyncio.Event) -> int:
        """Serves until `stop`; the body of a service's process.

        Args:
            stop: Set by SIGINT and SIGTERM.

        Returns:
            The exit code: 1 when it could not start.
        """
        try:
            if not await self.start(stop):
                return 0
        except StartError as error:
            sys.stderr.write(f"{self.name}: {error}\n")
            await self.stop()
            return 1
        # The line a supervisor reads the port from.
        sys.stdout.write(f"serving: {self.address}\n")
        sys.stdout.flush()
        await stop.wait()
        _log.info("draining", service=self.name)
        await self.stop()
        return 0


def run_process(name: str, make: Callable[[], Service], log_level: str) -> int:
    """Runs a service as this process.

    Args:
        name: The service's name in logs.
        make: Makes it, inside the event loop.
        log_level: Least severe log level written.

    Returns:
        The exit code.
    """
    setup_logging(log_level, name)

    async def main(stop: asyncio.Event) -> int:
        return await make().run(stop)

    return run_service(main)
