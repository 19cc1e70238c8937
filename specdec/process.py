"""What each service process does first, before torch and grpc are imported."""

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
# gRPC's event engine reads each socket on a thread of its own, which hands over to
# the completion queue's. Without it that thread reads the socket itself: a third
# of a round trip is saved. A release of gRPC without the choice logs that, and works.
_TRANSPORT = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}


def prepare_process() -> None:
    """Sets how a service's threads wait, unless the user has; ends it with its parent."""
    _set_environment({**_THREADS, **_TRANSPORT})
    exit_with_parent()


def prepare_client_process() -> None:
    """Sets how compute threads wait, unless the user has; gRPC stays as it comes."""
    _set_environment(_THREADS)


def _set_environment(values: dict[str, str]) -> None:
    for name, value in values.items():
        os.environ.setdefault(name, value)
