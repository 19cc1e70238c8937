"""What the benchmarks' command lines share."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any


def positive_int(text: str) -> int:
    """Reads an option's value of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 (got {value})")
    return value


def make_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Makes the parser of a benchmark's command line, with what all of them take.

    Args:
        module: The benchmark's module, as `python -m` takes it.
        description: What it measures.

    Returns:
        The parser, with --json.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser


def write_json(file: Path, document: dict[str, Any]) -> None:
    """Writes figures: paths become text, NaN null."""
    file.write_text(json.dumps(_to_json(document), indent=2) + "\n", encoding="utf-8")


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
