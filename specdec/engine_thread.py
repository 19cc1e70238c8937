"""The one thread that owns a device.

The event loop never computes: it posts commands, the engine thread runs them
between steps. So every change to engine state happens at a step boundary, on
one thread, in the order posted, and no lock is needed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import structlog

_log = structlog.get_logger(__name__)


class Engine(ABC):
    """Runs commands and steps on its own thread."""

    def __init__(self, name: str, *, owns_device: bool = True) -> None:
        """Makes the thread, not started.

        Args:
            name: The thread's name.
            owns_device: Whether steps compute. An engine whose steps are mere
                look-ups runs commands and steps at once, where they are posted,
                and needs no thread: two thread switches would be most of its time.
        """
        self._owns_device = owns_device
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stopped = False

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would do something. Called on the engine thread."""

    @abstractmethod
    def step(self) -> None:
        """Runs one step. Called on the engine thread; must not raise for one item's fault."""

    @abstractmethod
    def fail_step(self, error: Exception) -> None:
        """Ends the items of a step that raised, so that the rest goes on.

        Args:
            error: What the step raised.
        """

    def patience_s(self) -> float:
        """How long the next step may still wait for commands, in s; called before each step."""
        return 0.0

    def start(self) -> None:
        """Starts the thread."""
        if self._owns_device:
            self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ends the thread after the running step; posted commands still run."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def post(self, command: Callable[[], None]) -> None:
        """Runs a command before the next step; on the engine thread, if there is one.

        Args:
            command: What to run. Without a device, all calls must come from one thread.
        """
        if self._owns_device:
            self._inbox.put(command)
            return
        self._run_command(command)
        while self.has_work:
            self._run_step()

    def _run(self) -> None:
        while not self._stopped:
            self._run_commands()
            while self.has_work and not self._stopped and (wait_s := self.patience_s()) > 0.0:
                with contextlib.suppress(queue.Empty):
                    self._take(self._inbox.get(timeout=wait_s))
            if self.has_work and not self._stopped:
                self._run_step()

    def _run_step(self) -> None:
        try:
            self.step()
        except Exception as error:
            _log.exception("step failed")
            self._run_command(partial(self.fail_step, error))

    def _run_commands(self) -> None:
        """Runs what is posted; waits for something when there is no work."""
        try:
            command = self._inbox.get(block=not self.has_work)
            while True:
                self._take(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _take(self, command: Callable[[], None] | None) -> None:
        if command is None:
            self._stopped = True
        else:
            self._run_command(command)

    def _run_command(self, command: Callable[[], None]) -> None:
        try:
            command()
        except Exception:
            # Commands validate what they are given; this is a bug, and must not end the
            # engine: its thread would be gone and nothing would answer any more.
            _log.exception("command failed")
