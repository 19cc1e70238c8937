"""The pods of one tier: found by address or name, one channel each, watched.

An address is HOST:PORT, or dns:///NAME:PORT, a name whose addresses are the
pods (a headless service): it is resolved again and again, so that a new pod
gets work within seconds. A pod whose address is gone from the name keeps its
stream until that ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import grpc
import structlog

from orchestrator.service_stream import ServiceStream
from specdec.rpc.addresses import DNS

_log = structlog.get_logger(__name__)

Client = TypeVar("Client", bound="ServiceStream[Any, Any, Any]")

_INFO_TIMEOUT_S = 2.0


class Pool(Generic[Client]):
    """The clients of one tier's pods."""

    def __init__(
        self, addresses: Iterable[str], make: Callable[[str], Client], *, refresh_interval_ms: int
    ) -> None:
        """Connects to nothing yet.

        Args:
            addresses: HOST:PORT or dns:///NAME:PORT.
            make: Makes the client of one HOST:PORT.
            refresh_interval_ms: Time between two looks at names and loads, in ms.
        """
        self._addresses = list(addresses)
        self._make = make
        self._interval_s = refresh_interval_ms / 1e3
        self._clients: dict[str, Client] = {}
        self._listed: set[str] = set()
        """Addresses that are named now."""
        self._unresolved: set[str] = set()
        """Names that could not be resolved last time, and were told."""
        self._task: asyncio.Task[None] | None = None

    @property
    def clients(self) -> list[Client]:
        """All pods known."""
        return list(self._clients.values())

    def usable(self) -> list[Client]:
        """Pods that can be given new work."""
        return [
            client
            for address, client in self._clients.items()
            if client.is_usable and address in self._listed
        ]

    @property
    def refusal(self) -> str:
        """Why a pod is not used although it answers; "" when there is none such."""
        return next((client.refusal for client in self.clients if client.refusal), "")

    def start(self) -> None:
        """Looks for the pods, connects to them, and goes on looking."""
        self._task = asyncio.create_task(self._refresh())

    async def stop(self) -> None:
        """Ends all streams."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.gather(*(client.stop() for client in self.clients))

    async def wait_for_answer(self) -> None:
        """Waits until a pod answered that fits, or all that are known answered and none fits."""
        while not self.usable():
            clients = self.clients
            if clients and all(client.refusal for client in clients):
                return
            await asyncio.sleep(0.01)

    async def _refresh(self) -> None:
        while True:
            try:
                await self._find_pods()
                await self.ask_infos()
            except Exception:
                _log.exception("refreshing the pool failed")
            await asyncio.sleep(self._interval_s)

    async def _find_pods(self) -> None:
        listed: set[str] = set()
        for address in self._addresses:
            listed.update(await self._resolve(address))
        self._listed = listed
        for address in sorted(listed - self._clients.keys()):
            self._clients[address] = client = self._make(address)
            client.start()
        for address in self._clients.keys() - listed:
            # Not named any more: let go as soon as it does nothing for us.
            if not self._clients[address].is_connected:
                await self._clients.pop(address).stop()

    async def _resolve(self, address: str) -> list[str]:
        """The pods behind an address; those known when the name cannot be resolved now."""
        if not address.startswith(DNS):
            return [address]
        host, _, port = address.removeprefix(DNS).rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            if host not in self._unresolved:
                _log.warning("name not resolved", name=host, reason=str(error))
            self._unresolved.add(host)
            return [known for known in self._clients if known.endswith(f":{port}")]
        self._unresolved.discard(host)
        return sorted({_join(str(sockaddr[0]), port) for *_, sockaddr in found})

    async def ask_infos(self) -> list[Any]:
        """Asks every connected pod about itself; those that do not answer are left out."""

        async def ask(client: Client) -> Any:
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                client.info = await asyncio.wait_for(client.fetch_info(), _INFO_TIMEOUT_S)
                client.on_info()
                return client.info
            return None

        connected = [client for client in self.clients if client.is_connected]
        infos = await asyncio.gather(*(ask(client) for client in connected))
        return [info for info in infos if info is not None]


def _join(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
