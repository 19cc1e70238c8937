from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time


def run_and_signal(main: str, num_signals: int = 1) -> tuple[int, float]:
    """Runs a service, signals it when it says "ready", and times its end."""
    code = textwrap.dedent(
        """
        import asyncio, sys, time
        from specdec.rpc.lifecycle import load_or_stop, run_service

        def ready():
            print("ready", flush=True)
        """
    ) + textwrap.dedent(main)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    start = time.monotonic()
    for _ in range(num_signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    return process.wait(timeout=10), time.monotonic() - start


def test_signal_sets_the_stop_event() -> None:
    code, _ = run_and_signal(
        """
        async def main(stop):
            ready()
            await stop.wait()
            return 7
        sys.exit(run_service(main))
        """
    )
    assert code == 7


def test_signal_while_loading_ends_the_process() -> None:
    code, elapsed_s = run_and_signal(
        """
        def load():
            ready()
            time.sleep(30)
        async def main(stop):
            assert await load_or_stop(load, stop) is None
        sys.exit(run_service(main))
        """
    )
    assert code == 0
    assert elapsed_s < 3


def test_second_signal_ends_a_stuck_service() -> None:
    code, elapsed_s = run_and_signal(
        """
        async def main(stop):
            ready()
            await asyncio.sleep(30)
        sys.exit(run_service(main))
        """,
        num_signals=2,
    )
    assert code == 128 + signal.SIGTERM
    assert elapsed_s < 3


async def test_load_or_stop_returns_or_raises_what_the_work_did() -> None:
    import asyncio

    import pytest

    from specdec.rpc.lifecycle import load_or_stop

    assert await load_or_stop(lambda: 3, asyncio.Event()) == 3
    with pytest.raises(ZeroDivisionError):
        await load_or_stop(lambda: 1 // 0, asyncio.Event())
