"""That the benchmark of a round's own time runs; times are never asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import rounds, zero_cost
from tests.toy_models import save_random_llama


def test_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_random_llama(tmp_path / "model")
    figures = tmp_path / "figures.json"
    arguments = ["--model", str(model), "--pairs", "1", "--rounds", "50", "--json", str(figures)]
    assert rounds.main(arguments) == 0
    assert "ours / echo" in capsys.readouterr().out
    report = json.loads(figures.read_text())
    assert report["ratio"]["median"] > 0
    # Drafting works, and what is accepted is what the zero-cost target accepts.
    assert 2.5 < report["mean_acceptance_length"] <= zero_cost.NUM_ACCEPTED_TOKENS + 1


def test_echoed_messages_are_as_large_as_a_real_rounds() -> None:
    for request, response in rounds.round_messages():
        assert 80 < request.ByteSize() < 160
        assert 20 < response.ByteSize() < 100
