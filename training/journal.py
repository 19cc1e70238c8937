"""A file of JSON lines that survives a kill at any moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson


class Journal:
    """Appends JSON lines; a line that a kill has cut is taken back when opened again.

    Attributes:
        path: The file.
        entries: What it held when opened.
        num_lines: Lines it holds now.
    """

    def __init__(self, path: Path) -> None:
        """Opens a file, making it if missing.

        Args:
            path: The file; nobody else may write to it meanwhile.
        """
        self.path = path
        # Unbuffered: a line is with the operating system when `append` returns.
        self._file = path.open("a+b", buffering=0)
        self._file.seek(0)
        content = self._file.read()
        self.entries, num_good_bytes = _parse(content)
        if num_good_bytes < len(content):
            self._file.truncate(num_good_bytes)
        self.num_lines = len(self.entries)

    def append(self, entry: dict[str, Any]) -> None:
        """Adds a line."""
        rest = orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
        while rest:  # a disk that gets full takes a part before it refuses
            rest = rest[self._file.write(rest) :]
        self.num_lines += 1

    def close(self) -> None:
        """Puts the lines on disk."""
        os.fsync(self._file.fileno())
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a finished file of JSON lines.

    Args:
        path: The file.

    Returns:
        Its lines.

    Raises:
        ValueError: If a line is not JSON.
    """
    try:
        return [orjson.loads(line) for line in path.read_bytes().splitlines()]
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path}: damaged: {error}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file: readers see the old content or the new one, never a part."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Puts a folder's names on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The whole lines at the start, and their length in bytes."""
    entries: list[dict[str, Any]] = []
    num_bytes = 0
    for line in content.splitlines(keepends=True):
        try:
            entry = orjson.loads(line) if line.endswith(b"\n") else None
        except orjson.JSONDecodeError:
            break
        if not isinstance(entry, dict):
            break
        entries.append(entry)
        num_bytes += len(line)
    return entries, num_bytes
