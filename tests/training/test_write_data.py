"""The whole command on small random models, in float32."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench import write_data
from specdec.randomness import derive_keys
from specdec.sampling import draw_tokens, probs_from_logits
from specdec.types import SamplingParams
from tests.toy_models import save_bigram, save_random_llama, toy_tokenizer
from training.dataset import Conversation, read_conversations
from training.write_data import INTERRUPTED, main
from training.writer import Writer

ROOT = Path(__file__).parents[2]
END, START, USER, ANSWER = 63, 60, 61, 62
TEMPLATE = (
    "{% for message in messages %}"
    f"t{START} {{{{ 't{USER}' if message.role == 'user' else 't{ANSWER}' }}}}"
    f" {{{{ message.content }}}} t{END} {{% endfor %}}"
    f"{{% if add_generation_prompt %}}t{START} t{ANSWER}{{% endif %}}"
)
OPENING = [START, USER]
MAX_PROMPT_TOKENS, MAX_ANSWER_TOKENS = 12, 16
TEMPERATURE = 0.9


def save_chat_tokenizer(folder: Path) -> Path:
    # The start of a turn is a control token that ends none.
    tokenizer = toy_tokenizer(64, (END,), bos=START)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose every token depends on all before it."""
    folder = save_random_llama(tmp_path_factory.mktemp("model"), eos_token_id=END)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():  # it ends turns often enough
        model.lm_head.weight[END] *= 1.5
    model.save_pretrained(folder)
    return save_chat_tokenizer(folder)


def bigram(folder: Path, after_start: dict[int, float], end_prob: float) -> Path:
    """A model with given first words, and given ends after any other word."""
    table = np.full((64, 64), (1.0 - end_prob) / 60)
    table[:, START:] = [0.0, 0.0, 0.0, end_prob]
    table[USER] = 0.0
    for token_id, prob in after_start.items():
        table[USER, token_id] = prob
    save_bigram(folder, table, eos_token_id=END)
    return save_chat_tokenizer(folder)


def arguments(model: Path, out: Path, num_conversations: int, **options: object) -> list[str]:
    flags = {
        "model": model,
        "out": out,
        "num_conversations": num_conversations,
        "max_prompt_tokens": MAX_PROMPT_TOKENS,
        "max_answer_tokens": MAX_ANSWER_TOKENS,
        "temperature": TEMPERATURE,
        "dtype": "float32",
        **options,
    }
    return [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]


def write(
    model: Path, out: Path, num_conversations: int, **options: object
) -> dict[int, Conversation]:
    assert main(arguments(model, out, num_conversations, **options)) == 0
    return read(out)


def read(out: Path) -> dict[int, Conversation]:
    return {conversation.index: conversation for conversation in read_conversations(out)}


def read_drops(out: Path) -> dict[int, str]:
    lines = map(json.loads, (out / "dropped.jsonl").read_text().splitlines())
    return {line["index"]: line["reason"] for line in lines}


def card(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "data.json").read_bytes())
    return content


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Conversation]:
    """Two dozen conversations, written in one go."""
    out = tmp_path_factory.mktemp("expected")
    return write(folder, out, 24, batch_size=16)


def test_conversations_are_what_the_model_alone_writes(
    folder: Path, expected: dict[int, Conversation]
) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert {conversation.greedy for conversation in expected.values()} == {True, False}
    assert {conversation.finish_reason for conversation in expected.values()} == {"stop", "length"}
    for index, each in expected.items():
        words = [int(word[1:]) for word in each.prompt.split()]
        assert each.prompt_ids == (*OPENING, *words, END, START, ANSWER)
        assert 1 <= len(words) <= MAX_PROMPT_TOKENS
        assert len(each.answer_ids) <= MAX_ANSWER_TOKENS
        assert (each.answer_ids[-1] == END) == (each.finish_reason == "stop")
        assert END not in each.answer_ids[:-1]
        params = SamplingParams(temperature=TEMPERATURE)
        assert [*words, END] == draws(reference, OPENING, [*words, END], params, 2 * index)
        if each.greedy:
            params = SamplingParams(temperature=0.0)
        answer = list(each.answer_ids)
        assert answer == draws(reference, list(each.prompt_ids), answer, params, 2 * index + 1)


@torch.inference_mode()
def draws(
    model: Any, prompt: list[int], output: list[int], params: SamplingParams, choice: int
) -> list[int]:
    """What stock transformers and the seed's subkey give at each of the output's positions."""
    logits = model(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    positions = range(len(prompt), len(prompt) + len(output))
    keys = [derive_keys(0, choice=choice).target] * len(output)
    drawn: list[int] = draw_tokens(
        probs_from_logits(logits.float(), [params] * len(output)), keys, positions
    ).tolist()
    return drawn


@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_conversation_does_not_depend_on_its_batch(
    folder: Path, expected: dict[int, Conversation], tmp_path: Path, batch_size: int
) -> None:
    assert write(folder, tmp_path, 24, batch_size=batch_size) == expected


def test_another_seed_writes_other_conversations(
    folder: Path, expected: dict[int, Conversation], tmp_path: Path
) -> None:
    written = write(folder, tmp_path, 24, seed=1)
    assert not {each.prompt for each in written.values()} & {
        each.prompt for each in expected.values() if len(each.prompt_ids) > 9
    }


def test_counts_add_up(tmp_path: Path) -> None:
    """A first word of five kinds; after the fifth many prompts are alike."""
    first = {END: 0.2, START: 0.1, 1: 0.4, 2: 0.3}
    model = bigram(tmp_path / "model", first, end_prob=0.3)
    out = tmp_path / "out"
    written = write(model, out, 40, max_prompt_tokens=3, batch_size=8)
    counts = card(out)["counts"]
    dropped = counts["dropped"]
    assert counts["conversations"] == len(written) == 40
    assert counts["prompts"] == 40 + sum(dropped.values()) == max(written) + 1
    assert all(dropped[reason] for reason in ("empty", "too_long", "control_token", "duplicate"))
    assert dropped["excluded"] == 0
    assert len({each.prompt for each in written.values()}) == 40
    assert max(len(each.prompt.split()) for each in written.values()) == 3
    assert counts["greedy"] == sum(each.greedy for each in written.values())
    assert 10 < counts["greedy"] < 30
    assert counts["answer_tokens"] == sum(len(each.answer_ids) for each in written.values())
    drops = read_drops(out)
    assert drops.keys() == set(range(max(written))) - written.keys()
    assert card(out)["is_complete"]
    assert card(out)["decoding"]["tokens_per_second"] > 0
    # Which of two like prompts is dropped does not depend on which is finished first.
    alone = tmp_path / "alone"
    assert write(model, alone, 40, max_prompt_tokens=3, batch_size=1) == written
    assert read_drops(alone) == drops


def test_a_prompt_may_end_in_text(tmp_path: Path) -> None:
    """As "[/INST]" does: here "t50 t51", which the model writes after every third word."""
    table = np.full((64, 64), 0.7 / 50)
    table[:, 50:] = 0.0
    table[:, 50] = 0.3
    table[50] = np.eye(64)[51]
    table[51] = np.eye(64)[END]
    save_bigram(tmp_path / "model", table, eos_token_id=END)
    tokenizer = toy_tokenizer(64, (END,), bos=START)
    tokenizer.chat_template = (
        f"{{% for message in messages %}}t{START} {{{{ message.content }}}} t50 t51 {{% endfor %}}"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    written = write(tmp_path / "model", tmp_path / "out", 10)
    for each in written.values():
        words = [int(word[1:]) for word in each.prompt.split()]
        assert words
        assert not {50, 51} & set(words)
        assert each.prompt_ids == (START, *words, 50, 51)
        assert each.answer_ids == (END,)


def test_the_same_command_extends_and_other_settings_are_refused(
    folder: Path,
    expected: dict[int, Conversation],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = write(folder, tmp_path, 15)
    shards = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("shard*")}
    assert write(folder, tmp_path, 24, batch_size=3) == expected
    assert first.items() <= expected.items()
    assert shards.items() <= {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("shard*")}.items()
    assert main(arguments(folder, tmp_path, 24, temperature=0.5)) == 1
    assert "settings.temperature 0.9, not 0.5" in capsys.readouterr().err
    assert read(tmp_path) == expected


def test_a_kill_loses_nothing_finished(
    folder: Path, expected: dict[int, Conversation], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "training.write_data"]
    process = subprocess.Popen(
        # More than is wanted in the end, so that it is still at work when killed.
        [*command, *arguments(folder, out, 100_000, batch_size=4)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
    )
    shard = out / "shard-00000.jsonl.partial"
    deadline_s = time.monotonic() + 60
    while not shard.exists() or len(shard.read_bytes().splitlines()) < 8:
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    with shard.open("rb+") as file:  # as if the last line had been torn
        file.truncate(shard.stat().st_size - 5)
    kept = [json.loads(line)["index"] for line in shard.read_bytes().splitlines()[:-1]]
    written = write(folder, out, 24)
    assert written.items() >= {i: each for i, each in expected.items() if i in kept}.items()
    assert set(kept) <= written.keys()
    assert {i: each for i, each in written.items() if i in expected} == {
        i: each for i, each in expected.items() if i in written
    }


def test_ctrl_c_keeps_what_is_finished(
    folder: Path,
    expected: dict[int, Conversation],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, num_steps = Writer.step, 0

    def interrupted_step(writer: Writer) -> None:
        nonlocal num_steps
        num_steps += 1
        step(writer)
        if num_steps == 60:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Writer, "step", interrupted_step)
    assert main(arguments(folder, tmp_path, 24, batch_size=8)) == INTERRUPTED
    assert num_steps == 60
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    kept = read(tmp_path)
    assert 0 < len(kept) < 24
    assert kept.items() <= expected.items()
    assert not card(tmp_path)["is_complete"]
    monkeypatch.undo()
    assert write(folder, tmp_path, 24) == expected


def test_excluded_prompts_are_left_out(
    folder: Path, expected: dict[int, Conversation], tmp_path: Path
) -> None:
    indices = sorted(expected)[3:5]
    file = tmp_path / "bench.jsonl"
    turns = [expected[index].prompt.replace(" ", "\n ") for index in indices]
    file.write_text(json.dumps({"turns": turns}) + "\n")
    out = tmp_path / "out"
    written = write(folder, out, 24, exclude=file)
    assert not written.keys() & set(indices)
    assert written.items() >= {i: e for i, e in expected.items() if i not in indices}.items()
    assert card(out)["counts"]["dropped"]["excluded"] == 2
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert card(out)["excluded"] == [{"file": file.name, "sha256": digest, "num_prompts": 2}]


def test_prompts_of_a_file_are_answered(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    long = " ".join(["t7"] * (MAX_PROMPT_TOKENS + 1))
    file.write_text(f"t1 t2\n{long}\nt3\nt1 t2\nt4 t5\nt8 \tt9\n")
    excluded = tmp_path / "bench.jsonl"
    excluded.write_text('{"turns": ["t8 t9"]}\n')
    out = tmp_path / "out"
    written = write(folder, out, 9, prompts=file, exclude=excluded, temperature=0)
    assert {i: each.prompt for i, each in written.items()} == {0: "t1 t2", 2: "t3", 4: "t4 t5"}
    assert written[0].prompt_ids == (*OPENING, 1, 2, END, START, ANSWER)
    assert all(each.greedy for each in written.values())
    dropped = card(out)["counts"]["dropped"]
    assert [dropped[reason] for reason in ("too_long", "duplicate", "excluded")] == [1, 1, 1]
    assert card(out)["is_complete"]


def test_a_model_that_writes_nothing_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = bigram(tmp_path / "model", {END: 1.0}, end_prob=0.5)
    assert main(arguments(model, tmp_path / "out", 1000, batch_size=50)) == 1
    assert "1000 prompts were all dropped, the last one as empty" in capsys.readouterr().err
    assert card(tmp_path / "out")["counts"]["dropped"]["empty"] == 1000


def test_the_benchmark_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Times are never asserted."""
    options = {"model": folder, "pairs": 1, "batch-size": 3, "max-tokens": 12, "dtype": "float32"}
    assert write_data.main([f"--{name}={value}" for name, value in options.items()]) == 0
    assert "script / generate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--temperature=0", "temperature must be above 0 (got 0.0)"),
        ("--num-conversations=0", "num_conversations must be at least 1 (got 0)"),
        ("--top-p=0", "top_p must be in (0, 1] (got 0.0)"),
        ("--greedy-share=1.5", "greedy_share must be in [0, 1] (got 1.5)"),
        ("--batch-size=0", "batch_size must be at least 1 (got 0)"),
        ("--seed=-1", "seed must be in [0, 2^64) (got -1)"),
    ],
)
def test_a_bad_setting_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        main([f"--out={tmp_path}", "--num-conversations=1", flag])
    assert message in capsys.readouterr().err
