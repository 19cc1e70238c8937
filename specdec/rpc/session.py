"""One orchestrator's long-lived stream to an engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

Request = TypeVar("Request")
Response = TypeVar("Response")


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
