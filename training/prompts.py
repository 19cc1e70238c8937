"""Files of prompts: those to answer, and those to keep out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from specdec.models.loading import file_digest


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of a file that must not be in a data set."""

    name: str
    """The file's name, without its folder."""
    sha256: str
    """Hex SHA-256 of the file."""
    prompts: frozenset[str]
    """Every turn, normalised."""


def normalise(text: str) -> str:
    """Makes texts equal that differ in white space alone."""
    return " ".join(text.split())


def read_turns(file: Path) -> list[list[str]]:
    """Reads conversations as their users' turns.

    Args:
        file: JSON lines, each with `turns`, a list of strings.

    Returns:
        The turns of each line that is not blank.

    Raises:
        ValueError: If a line is none, or the file has none.
    """
    conversations = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}:{number}: not a JSON object with turns") from error
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise ValueError(f"{file}:{number}: turns is not a list of strings")
        conversations.append(turns)
    if not conversations:
        raise ValueError(f"{file}: no prompts")
    return conversations


def read_prompts(file: Path) -> list[str]:
    """Reads prompts to answer.

    Args:
        file: JSON lines if its name ends in .jsonl, the first of the `turns` being
            the prompt; else one prompt a line.

    Returns:
        At least one prompt, in the file's order.

    Raises:
        ValueError: If a line is malformed, or the file holds no prompt.
    """
    if file.suffix == ".jsonl":
        return [turns[0] for turns in read_turns(file)]
    lines = file.read_text(encoding="utf-8").splitlines()
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{file}: no prompts")
    return prompts


def read_excluded(file: Path) -> PromptSet:
    """Reads prompts to keep out.

    Args:
        file: JSON lines, each with `turns`; all turns count.

    Returns:
        The set.

    Raises:
        ValueError: If a line is malformed, or the file holds no prompt.
    """
    turns = [turn for conversation in read_turns(file) for turn in conversation]
    return PromptSet(file.name, file_digest(file), frozenset(map(normalise, turns)))
