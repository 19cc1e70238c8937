"""Prompt sets: JSON lines whose `turns` begin with what the user says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from orchestrator.tokenization import ChatMessage, Tokenization

DEFAULT_FILE = Path(__file__).with_name("prompts.jsonl")
"""A few prompts of several kinds, used when no file is named."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One chat prompt, as both sides are given it."""

    content: str
    """What the user says."""
    token_ids: tuple[int, ...]
    """The same through the chat template."""


def load_prompts(file: Path, tokenization: Tokenization, max_tokens: int) -> list[Prompt]:
    """Reads a prompt set.

    Args:
        file: JSON lines, each with `turns`, a list of strings; the first is used.
        tokenization: The target's.
        max_tokens: Tokens of a content kept; the rest is cut off.

    Returns:
        The prompts, in the file's order.

    Raises:
        ValueError: If the file holds no prompt, or a line is none.
    """
    prompts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            content = str(json.loads(line)["turns"][0])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{file}:{number}: not a JSON object with turns") from error
        content = _cut(content, tokenization, max_tokens)
        token_ids = tokenization.encode_conversation([ChatMessage("user", content)])
        prompts.append(Prompt(content, tuple(token_ids)))
    if not prompts:
        raise ValueError(f"{file}: no prompts")
    return prompts


def choose(prompts: list[Prompt], num_prompts: int) -> list[Prompt]:
    """Takes prompts at even distances, because files are sorted by kind; all if there are fewer."""
    num_prompts = min(num_prompts, len(prompts))
    return [prompts[i * len(prompts) // num_prompts] for i in range(num_prompts)]


def _cut(content: str, tokenization: Tokenization, max_tokens: int) -> str:
    encoding = tokenization.tokenizer.encode(content, add_special_tokens=False)
    if len(encoding.ids) <= max_tokens:
        return content
    return content[: encoding.offsets[max_tokens - 1][1]]
