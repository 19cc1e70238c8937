"""What each service process does first, before torch is imported."""

from __future__ import annotations

import os

from specdec.parent_watch import exit_with_parent

# Three torch processes share few cores, so that idle compute threads must not
# spin for long. But a thread that sleeps at once must be woken for each of the
# hundreds of small operations of a step, which made steps 1.5 times longer here:
# some microseconds of spinning get both. The libraries read these when loaded.
_THREADS = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "20000",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_process() -> None:
    """Sets how threads wait, unless the user has, and ends with the parent process."""
    for name, value in _THREADS.items():
        os.environ.setdefault(name, value)
    exit_with_parent()
