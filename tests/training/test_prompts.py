from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from training.prompts import normalise, read_excluded, read_prompts


def test_white_space_does_not_count() -> None:
    assert normalise(" a\n b\t\tc ") == "a b c"


def test_prompts_are_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("One.\n\n  Two {x}.\n")
    assert read_prompts(file) == ["One.", "  Two {x}."]


def test_prompts_are_first_turns(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["One.", "More?"], "id": 1}\n\n{"turns": ["Two."]}\n')
    assert read_prompts(file) == ["One.", "Two."]


def test_every_turn_is_excluded(tmp_path: Path) -> None:
    file = tmp_path / "bench.jsonl"
    file.write_text('{"turns": ["One  line.", "More?"]}\n{"turns": ["Two."]}\n')
    excluded = read_excluded(file)
    assert excluded.prompts == {"One line.", "More?", "Two."}
    assert (excluded.name, excluded.sha256) == (
        "bench.jsonl",
        hashlib.sha256(file.read_bytes()).hexdigest(),
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "\n", "no prompts"),
        ("a.jsonl", "", "no prompts"),
        ("a.jsonl", "Why?\n", ":1: not a JSON object with turns"),
        ("a.jsonl", '{"turns": ["a"]}\n{"prompt": "a"}\n', ":2: not a JSON object with turns"),
        ("a.jsonl", '{"turns": []}\n', "not a list of strings"),
        ("a.jsonl", '{"turns": "a"}\n', "not a list of strings"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(file)
