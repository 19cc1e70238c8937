"""What all tests share."""

from __future__ import annotations

import os

import pytest

from specdec.process import prepare_process

prepare_process()  # the services run in this process

from specdec.telemetry.logging import setup_logging  # noqa: E402

# They need a device of their own: `make test-gpu` sets it.
collect_ignore = [] if "SPECDEC_TEST_DEVICE" in os.environ else ["gpu"]


@pytest.fixture(autouse=True, scope="session")
def _quiet_logs() -> None:
    """A step's log line per step would bury the report of a failing test."""
    setup_logging("warning", "tests")
