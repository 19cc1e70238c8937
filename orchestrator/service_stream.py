"""One long-lived stream to another service: connects, reconnects, writes, reads.

What becomes ready in one tick of the event loop goes out as one message, within
a bound of bytes; one writer keeps the order.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Any, Generic, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from specdec.rpc.channel import open_channel
from specdec.rpc.interceptors import tracing_client_interceptors
from specdec.telemetry.tracing import Tracing

_log = structlog.get_logger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
Info = TypeVar("Info")

# A message larger than this holds up small ones behind it.
_MAX_TICK_BYTES = 1024 * 1024
# Of a message, beside its one part: field tags and lengths.
_ENVELOPE_BYTES = 64
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 2.0
_INFO_TIMEOUT_S = 10.0


class PairingError(Exception):
    """The other service does not fit this one; the message says why."""


class ServiceStream(ABC, Generic[Request, Response, Info]):
    """The stream to one service.

    Attributes:
        info: What the service last said about itself; None before it did.
        is_connected: Whether the stream is up.
        is_serving: Whether its health service says so; a draining one does not.
        refusal: Why the service is not used although it answers; "" if it is.
    """

    def __init__(self, address: str, *, max_message_bytes: int, tracing: Tracing) -> None:
        """Opens nothing yet.

        Args:
            address: HOST:PORT.
            max_message_bytes: Largest message, in bytes.
            tracing: Where spans of unary calls go.
        """
        self.address = address
        self.info: Info | None = None
        self.is_connected = False
        self.is_serving = False
        self.refusal = ""
        self._max_message_bytes = max_message_bytes
        self._tracing = tracing
        self._outbox: asyncio.Queue[Request] = asyncio.Queue()
        self._tick_message: Any = None
        self._tick_bytes = 0
        self._channel: grpc.aio.Channel | None = None
        self._task: asyncio.Task[None] | None = None

    # What the two kinds of service differ in.

    @abstractmethod
    def new_request(self) -> Request:
        """An empty message."""

    @abstractmethod
    def open_stream(
        self, channel: grpc.aio.Channel, requests: AsyncIterator[Request]
    ) -> AsyncIterator[Response]:
        """Starts the streaming call."""

    @abstractmethod
    async def fetch_info(self) -> Info:
        """Asks the service about itself."""

    @abstractmethod
    def check_pairing(self, info: Info) -> None:
        """Checks that the service fits.

        Args:
            info: What it said about itself.

        Raises:
            PairingError: If it does not; it is not used then.
        """

    @abstractmethod
    def on_response(self, response: Response) -> None:
        """Takes a message of the service."""

    @abstractmethod
    def on_lost(self) -> None:
        """Learns that the stream broke: nothing it was asked will be answered."""

    def on_info(self) -> None:
        """Learns that `info` is new."""

    # Life.

    @property
    def is_usable(self) -> bool:
        """Whether it can be given new work."""
        return self.is_connected and self.is_serving and not self.refusal

    @property
    def max_part_bytes(self) -> int:
        """Most bytes one opening or item may have: a message that is too large ends the stream."""
        return self._max_message_bytes - _ENVELOPE_BYTES

    def start(self) -> None:
        """Connects, and connects again whenever the stream breaks."""
        self._channel = open_channel(
            self.address, self._max_message_bytes, tracing_client_interceptors(self._tracing)
        )
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ends the stream."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._channel is not None:
            await self._channel.close()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel, once started."""
        assert self._channel is not None
        return self._channel

    async def _run(self) -> None:
        backoff_s = _MIN_BACKOFF_S
        while True:
            try:
                info = await asyncio.wait_for(self.fetch_info(), _INFO_TIMEOUT_S)
                self._pair(info)
                backoff_s = _MIN_BACKOFF_S
                if not self.refusal:
                    await self._stream()
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else "timeout"
                _log.debug("no stream", address=self.address, reason=reason)
            except Exception:
                # A message we cannot read must not end the pairing for good.
                _log.exception("stream failed", address=self.address)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _pair(self, info: Info) -> None:
        self.info = info
        try:
            self.check_pairing(info)
            self.refusal = ""
        except PairingError as error:
            if str(error) != self.refusal:
                _log.error("refused to pair", address=self.address, reason=str(error))
            self.refusal = str(error)

    async def _stream(self) -> None:
        self._outbox = asyncio.Queue()
        self._tick_message = None
        responses = self.open_stream(self.channel, self._requests(self._outbox))
        self.is_connected = self.is_serving = True
        health = asyncio.create_task(self._watch_health())
        _log.info("stream up", address=self.address)
        try:
            async for response in responses:
                self.on_response(response)
        finally:
            health.cancel()
            self.is_connected = False
            _log.info("stream down", address=self.address)
            self.on_lost()

    async def _watch_health(self) -> None:
        """Follows the service's health; without a health service it counts as serving."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for response in stub.Watch(health_pb2.HealthCheckRequest()):
                self.is_serving = response.status == health_pb2.HealthCheckResponse.SERVING

    async def _requests(self, outbox: asyncio.Queue[Request]) -> AsyncIterator[Request]:
        while True:
            message = await outbox.get()
            if message is self._tick_message:
                self._tick_message = None  # complete: what is ready later is another message
            yield message

    # Sending.

    def send(
        self, *, opens: Iterable[Any] = (), items: Iterable[Any] = (), releases: Iterable[Any] = ()
    ) -> None:
        """Adds to this tick's message; nothing is sent while the stream is down.

        Args:
            opens: Proto messages of the `opens` field.
            items: Proto messages of the `items` field.
            releases: Proto messages of the `releases` field.
        """
        if not self.is_connected:
            return
        for field, messages in (("opens", opens), ("items", items), ("releases", releases)):
            for message in messages:
                num_bytes = message.ByteSize()
                if self._tick_message is None or self._tick_bytes + num_bytes > _MAX_TICK_BYTES:
                    # The writer wakes up in the next tick, so that all of this tick's joins in.
                    self._tick_message = self.new_request()
                    self._tick_bytes = 0
                    self._outbox.put_nowait(self._tick_message)
                getattr(self._tick_message, field).append(message)
                self._tick_bytes += num_bytes
