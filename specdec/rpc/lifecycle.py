"""The life of a service process: from the command line to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, TypeVar

import uvloop

from specdec.rpc.server import PortInUseError

T = TypeVar("T")

# The engine thread and the event loop share the interpreter lock. A thread that
# wants it waits this long before it asks the other to let go, so the default of
# 5 ms would be added to every hop.
SWITCH_INTERVAL_S = 0.0005


def run_service(main: Callable[[asyncio.Event], Awaitable[int | None]]) -> int:
    """Runs a service until it ends.

    SIGINT and SIGTERM set the stop event from the first moment on, also while a
    model loads; a second one ends the process at once.

    Args:
        main: The service; gets the stop event. Long blocking work belongs on a
            thread (see `load_or_stop`), or the stop event is seen late.

    Returns:
        The exit code: main's, with None as 0, or 1 for a taken port.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        return uvloop.run(_run(main))
    except PortInUseError as error:
        sys.stderr.write(f"{error}\n")
        return 1


async def _run(main: Callable[[asyncio.Event], Awaitable[int | None]]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    num_signals = 0

    # Plain handlers rather than the loop's: they run even while something blocks the loop.
    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals > 1:
            os._exit(128 + number)
        loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    return await main(stop) or 0


async def load_or_stop(load: Callable[[], T], stop: asyncio.Event) -> T | None:
    """Runs something long on a thread, unless the service is to stop first.

    Args:
        load: Blocking work, such as loading a model.
        stop: The stop event.

    Returns:
        Its result; None when the stop came first. The work is then left behind
        on a daemon thread, which ends with the process.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        value, error = None, None
        try:
            value = load()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The loop may have ended meanwhile.
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=work, name="load", daemon=True).start()
    stopped = asyncio.ensure_future(stop.wait())
    waited: set[asyncio.Future[Any]] = {result, stopped}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if result.done():
        return result.result()
    result.cancel()
    return None
