"""The benchmark's arithmetic by hand, and that it runs; times are never asserted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bench import decode
from bench.decode import Pair, make_report
from bench.prompts import DEFAULT_FILE, Prompt, choose, load_prompts
from bench.samples import (
    Sample,
    concurrent_rate,
    decode_rate,
    ratios,
    spread,
    steady_rate,
    total_rate,
    typical_rate,
)
from orchestrator.tokenization import Tokenization
from tests.toy_models import save_random_llama

TEMPLATE = "{% for message in messages %}t1 {{ message['content'] }} t2 {% endfor %}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_random_llama(tmp_path_factory.mktemp("toy"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def sample(start_s: float, *arrivals: tuple[float, int], **stats: int) -> Sample:
    return Sample(start_s=start_s, arrivals=arrivals, **stats)


def test_rates_of_one_stream() -> None:
    # 1 s of prefill, then 3 tokens in 2 s; and 2 s of prefill, then 1 token in 2 s.
    runs = [sample(0.0, (1.0, 1), (2.0, 2), (3.0, 1)), sample(10.0, (12.0, 2), (14.0, 1))]
    assert decode_rate(runs) == pytest.approx(4 / 4)
    assert total_rate(runs) == pytest.approx(7 / 7)


def test_rate_of_a_single_output_is_not_a_number() -> None:
    assert math.isnan(decode_rate([sample(0.0, (1.0, 1))]))


def test_rates_of_concurrent_streams() -> None:
    # Both decode from 2 s to 4 s, in which the first makes 2 tokens and the second 3.
    runs = [
        sample(0.0, (1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)),
        sample(0.0, (2.0, 1), (3.0, 3), (5.0, 1)),
    ]
    assert steady_rate(runs) == pytest.approx(5 / 2)
    assert concurrent_rate(runs) == pytest.approx(9 / 5)
    assert steady_rate(runs[:1]) == pytest.approx(decode_rate(runs[:1]))


def test_streams_that_never_overlap_have_no_steady_rate() -> None:
    runs = [sample(0.0, (1.0, 1), (2.0, 1)), sample(0.0, (3.0, 1), (4.0, 1))]
    assert math.isnan(steady_rate(runs))


def test_a_burst_in_one_turn_does_not_count() -> None:
    def turn(first_prompt_s: float, second_prompt_s: float) -> list[Sample]:
        return [sample(0.0, (1.0, 1), (1.0 + s, 4)) for s in (first_prompt_s, second_prompt_s)]

    turns = [turn(2.0, 60.0), turn(2.0, 6.0), turn(90.0, 6.0)]
    assert typical_rate(turns) == pytest.approx(8 / 8)
    assert typical_rate(turns, with_prefill=True) == pytest.approx(10 / 10)


def test_ratios_are_taken_pair_by_pair() -> None:
    assert ratios([2.0, 9.0, 4.0], [1.0, 3.0, 8.0]) == [2.0, 3.0, 0.5]
    assert math.isnan(ratios([1.0], [0.0])[0])


def test_spread() -> None:
    values = spread([3.0, math.nan, 1.0, 10.0])
    assert (values.median, values.low, values.high) == (3.0, 1.0, 10.0)
    assert spread([2.0, 4.0]).median == 3.0
    assert math.isnan(spread([]).median)


def test_report() -> None:
    def pair(slowness: float) -> Pair:
        """Transformers takes 1 s a token, plain 0.5 s, and ngram 0.25 s, two at a time."""
        alone = {
            "transformers": [sample(0.0, *((i * slowness, 1) for i in range(1, 5)))],
            "plain": [sample(0.0, *((i * slowness / 2, 1) for i in range(1, 5)))],
            "ngram": [
                sample(
                    0.0,
                    (0.5 * slowness, 1),
                    (1.0 * slowness, 2),
                    (1.25 * slowness, 1),
                    num_rounds=3,
                    num_draft_tokens=4,
                    num_accepted_tokens=1,
                )
            ],
        }
        together = {side: alone[side] * 3 for side in ("plain", "ngram")}
        return Pair(alone, together, idle_cpu=0.0)

    report = make_report("set", [Prompt("a", (1, 2, 3))], [pair(1.0), pair(7.0)])
    assert report.ratios["decode: plain / transformers"] == spread([2.0, 2.0])
    assert report.ratios["decode: ngram / plain"].median == pytest.approx(2.0)
    assert report.ratios["decode: 3 streams / 1, plain"].median == pytest.approx(3.0)
    assert report.ratios["end to end: plain / transformers"].median == pytest.approx(2.0)
    assert report.typical["decode: plain / transformers"] == pytest.approx(2.0)
    assert report.typical["decode: 3 streams / 1, plain"] == pytest.approx(3.0)
    assert report.rates["transformers"].high == pytest.approx(1.0)
    assert report.first_token_ms["ngram"].low == pytest.approx(500.0)
    assert report.mean_acceptance_length == pytest.approx(4 / 3)
    assert report.acceptance_rate == pytest.approx(1 / 4)


def test_prompts_are_chosen_at_even_distances() -> None:
    prompts = [Prompt(str(i), (i,)) for i in range(10)]
    assert [prompt.content for prompt in choose(prompts, 4)] == ["0", "2", "5", "7"]
    assert choose(prompts, 99) == prompts


def test_long_prompts_are_cut(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps({"turns": ["t5 t6 t7 t8", "t9"]}) + "\n\n")
    (prompt,) = load_prompts(file, Tokenization(checkpoint), max_tokens=3)
    assert prompt == Prompt("t5 t6 t7", (1, 5, 6, 7, 2))


@pytest.mark.parametrize("line", ["{}", "[]", '{"turns": []}', "text", ""])
def test_files_without_prompts_are_refused(checkpoint: Path, tmp_path: Path, line: str) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=r"set\.jsonl"):
        load_prompts(file, Tokenization(checkpoint), max_tokens=3)


def test_the_prompts_that_come_along_are_readable(checkpoint: Path) -> None:
    assert len(load_prompts(DEFAULT_FILE, Tokenization(checkpoint), max_tokens=1500)) == 8


def test_runs(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "toy.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"t{i} t9 t8 t9"]}) + "\n" for i in (3, 4)))
    figures = tmp_path / "figures.json"
    arguments = ["--model", str(checkpoint), "--prompts", str(prompts), "--json", str(figures)]
    arguments += ["--pairs", "1", "--num-prompts", "1", "--streams", "2", "--max-tokens", "16"]
    assert decode.main([*arguments, "--dtype", "float32", "--lookup"]) == 0
    assert "toy: 1 prompts of 6 tokens" in capsys.readouterr().out
    (report,) = json.loads(figures.read_text())["reports"]
    assert set(report["rates"]) == {"transformers", "plain", "ngram", "lookup"}
    assert report["ratios"]["decode: plain / transformers"]["median"] > 0
    assert 1.0 <= report["mean_acceptance_length"] <= 6.0


def test_an_unusable_model_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--model", str(tmp_path / "nothing")]) == 1
    assert "no such folder" in capsys.readouterr().err
