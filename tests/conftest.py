"""What all tests share."""

from __future__ import annotations

import pytest

from specdec.telemetry.logging import setup_logging


@pytest.fixture(autouse=True, scope="session")
def _quiet_logs() -> None:
    """A step's log line per step would bury the report of a failing test."""
    setup_logging("warning", "tests")
