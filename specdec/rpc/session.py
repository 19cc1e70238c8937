"""One orchestrator's long-lived stream to an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import Message

Request = TypeVar("Request")
Response = TypeVar("Response")
Packed = TypeVar("Packed", bound=Message)

# Under the least limit of a message that can be set. A part is at most one token's q: 1 MiB
# for a vocabulary of 262,144.
_MAX_RESPONSE_BYTES = 512 * 1024


def pack(parts: Iterable[Message], new: Callable[[], Packed], field: str) -> Iterator[Packed]:
    """Puts parts into as few messages as are not too large: one that is would end the stream.

    Args:
        parts: In the order to be sent; each fits a message by itself.
        new: Makes an empty message.
        field: Its repeated field.

    Yields:
        The messages.
    """
    message, num_bytes = new(), 0
    for part in parts:
        size = part.ByteSize()
        if num_bytes and num_bytes + size > _MAX_RESPONSE_BYTES:
            yield message
            message, num_bytes = new(), 0
        getattr(message, field).append(part)
        num_bytes += size
    yield message


async def serve_session(
    requests: AsyncIterator[Request],
    write: Callable[[Response], Awaitable[None]],
    *,
    begin: Callable[[Callable[[Response], None]], None],
    take: Callable[[Request], None],
    end: Callable[[], None],
) -> None:
    """Carries messages in and responses out, in order, until the stream ends.

    Args:
        requests: The stream's messages.
        write: Writes one response to the stream.
        begin: Opens the session at the engine; gets a function that sends a
            response and may be called from any thread.
        take: Hands one message to the engine.
        end: Closes the session at the engine, whatever ended the stream.
    """
    outbox: asyncio.Queue[Response | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop_thread = threading.get_ident()

    async def read() -> None:
        try:
            async for request in requests:
                take(request)
        finally:
            outbox.put_nowait(None)

    def send(response: Response) -> None:
        if threading.get_ident() == loop_thread:
            outbox.put_nowait(response)
        else:
            loop.call_soon_threadsafe(outbox.put_nowait, response)

    begin(send)
    reader = asyncio.create_task(read())
    try:
        while (response := await outbox.get()) is not None:
            await write(response)
        await reader
    finally:
        reader.cancel()
        end()
