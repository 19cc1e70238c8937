"""Logs of one process, on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def setup_logging(level: str, service_name: str = "specdec") -> None:
    """Sets up structlog, and sends the standard library's logs the same way.

    A terminal gets readable lines, anything else one JSON object per line.

    Args:
        level: Least severe level written: debug, info, warning or error.
        service_name: The service, as every line names it.

    Raises:
        ValueError: When there is no such level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level must be debug, info, warning or error, not {level!r}")

    def add_service(logger: object, method: str, event: Any) -> Any:
        event["service"] = service_name
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
    ]
    is_terminal = sys.stderr.isatty()
    renderer: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer()]
        if is_terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    structlog.configure(
        processors=[
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(number),
        cache_logger_on_first_use=True,
    )
