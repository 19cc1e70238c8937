"""Lets a service end with the process that started it.

The supervisor gives each service the read end of a pipe whose write end only
the supervisor holds. The kernel closes that end however the supervisor dies,
SIGKILL included, and the service sees the end of the file.
"""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT_PIPE_FD = "SPECDEC_PARENT_PIPE_FD"
"""Environment variable with the file descriptor of the pipe's read end."""

_GRACE_S = 15.0  # for draining, cancelling what is left, and writing spans


def exit_with_parent() -> None:
    """Ends this process soon after its supervisor's end; nothing without a supervisor.

    Call it first thing in a service's main: it sends SIGTERM to itself, which
    drains, and leaves hard if that takes too long.
    """
    fd = os.environ.pop(PARENT_PIPE_FD, None)  # not for this process's own children
    if fd is not None:
        threading.Thread(target=_watch, args=(int(fd),), name="parent-watch", daemon=True).start()


def _watch(fd: int) -> None:
    os.read(fd, 1)  # nobody writes: it returns when the write end closes
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)
