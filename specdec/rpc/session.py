"""One orchestrator's long-lived stream to an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar

Request = TypeVar("Request")
Response = TypeVar("Response")


async def serve_session(
    requests: AsyncIterator[Request],
    *,
    begin: Callable[[Callable[[Response], None]], None],
    take: Callable[[Request], None],
    end: Callable[[], None],
) -> AsyncGenerator[Response, None]:
    """Carries messages in and responses out until the stream ends.

    Args:
        requests: The stream's messages.
        begin: Opens the session at the engine; gets a function that sends a
            response and may be called from any thread.
        take: Hands one message to the engine.
        end: Closes the session at the engine, whatever ended the stream.

    Yields:
        What the engine sends, in order.
    """
    outbox: asyncio.Queue[Response | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    async def read() -> None:
        try:
            async for request in requests:
                take(request)
        finally:
            outbox.put_nowait(None)

    def send(response: Response) -> None:
        loop.call_soon_threadsafe(outbox.put_nowait, response)

    begin(send)
    reader = asyncio.create_task(read())
    try:
        while (response := await outbox.get()) is not None:
            yield response
        await reader
    finally:
        reader.cancel()
        end()
