from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from specdec.telemetry.logging import setup_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_both_kinds_of_loggers_write_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("info", "target")
    structlog.get_logger("engine").info("step", num_tokens=3)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("grpc").exception("call %s failed", 7)
    structlog.get_logger("engine").debug("hidden")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["event"], first["num_tokens"], first["level"]) == ("step", 3, "info")
    assert (first["service"], first["logger"]) == ("target", "engine")
    assert first["timestamp"].endswith("Z")
    assert (second["event"], second["level"]) == ("call 7 failed", "error")
    assert "ValueError: bad" in second["exception"]


def test_unknown_level_is_named() -> None:
    with pytest.raises(ValueError, match="'loud'"):
        setup_logging("loud")
