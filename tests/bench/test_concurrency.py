"""The benchmarks of many streams and of prefill: their arithmetic, and that they run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench import concurrency, prefill
from bench.samples import Sample
from tests.toy_models import save_random_llama

TEMPLATE = "{% for message in messages %}t1 {{ message['content'] }} t2 {% endfor %}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_random_llama(tmp_path_factory.mktemp("toy"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_a_row_by_hand() -> None:
    def streams(step_s: float) -> list[Sample]:
        arrivals = tuple((1.0 + i * step_s, 1) for i in range(5))
        return [Sample(start_s=0.0, arrivals=arrivals)] * 2

    row = concurrency.make_row(
        2,
        {
            "transformers": [streams(1.0), streams(2.0)],
            "plain": [streams(0.5), streams(0.5)],
            "ngram": [streams(0.25), streams(0.25)],
        },
    )
    # Two streams of 5 tokens each: over 5 s and 9 s, 3 s, 2 s.
    assert row.rates["transformers"].high == pytest.approx(10 / 5)
    assert row.ratios["plain / transformers"].low == pytest.approx(5 / 3)
    assert row.ratios["ngram / plain"].median == pytest.approx(3 / 2)
    assert row.first_token_ms["plain"] == pytest.approx(1000)
    assert row.inter_token_ms["ngram"] == pytest.approx(250)


def test_many_streams_run(checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"t{i} t{i} t5"]}) + "\n" for i in range(3)))
    report = tmp_path / "report.json"
    arguments = ["--model", str(checkpoint), "--prompts", str(prompts), "--dtype", "float32"]
    arguments += ["--streams", "1", "4", "--pairs", "1", "--max-tokens", "6"]
    assert concurrency.main([*arguments, "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [row["num_streams"] for row in rows] == [1, 4]
    assert all(row["rates"][side]["median"] > 0 for row in rows for side in concurrency.SIDES)


def test_prefill_runs(checkpoint: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    arguments = ["--model", str(checkpoint), "--dtype", "float32", "--lengths", "20", "50"]
    assert prefill.main([*arguments, "--pairs", "1", "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [row["num_tokens"] for row in rows] == [20, 50]
    assert all(row["ratio"]["median"] > 0 for row in rows)
