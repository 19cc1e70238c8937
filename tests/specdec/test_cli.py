"""The command line against a fake orchestrator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from specdec.cli import app, coloured, summary, use_colour
from specdec.client import Chunk, Client, Token, build_request
from specdec.errors import InvalidArgumentError, ResourceExhaustedError
from tests.specdec.test_client import TRACE_ID, FakeOrchestrator, serving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake() -> FakeOrchestrator:
    return FakeOrchestrator()


@pytest.fixture
def address(fake: FakeOrchestrator) -> Iterator[str]:
    with serving(fake) as address:
        yield address


def specdec(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


def test_generate_piped_is_the_text_alone(address: str) -> None:
    result = specdec("generate", "--address", address, "hi")
    assert result.exit_code == 0
    assert result.stdout == "one two three!\n"
    assert result.stderr == (
        "4 tokens (stop) in 3 rounds | acceptance rate 0.50 | mean acceptance length 1.33"
        f" | 20.0 tokens/s | trace {TRACE_ID}\n"
    )


def test_flags_reach_the_request_and_others_stay_unset(
    fake: FakeOrchestrator, address: str
) -> None:
    flags = "--temperature 0 --top-p 0.5 --top-k 3 --seed 0 --max-tokens 9 --stop a --stop b"
    flags += " --stop-token-id 5 --ignore-eos --no-speculation --num-speculative-tokens 0"
    flags += " --drafter ngram --acceptance rejection --timeout 10"
    assert specdec("generate", "--address", address, *flags.split(), "hi").exit_code == 0
    assert specdec("generate", "--address", address, "hi").exit_code == 0
    full = build_request(
        "hi",
        {
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 3,
            "seed": 0,
            "max_tokens": 9,
            "stop": ["a", "b"],
            "stop_token_ids": [5],
            "ignore_eos": True,
            "speculation": False,
            "num_speculative_tokens": 0,
            "drafter": "ngram",
            "acceptance": "rejection",
        },
    )
    assert fake.requests == [full, build_request("hi", {})]


def test_prompt_from_stdin_and_as_a_chat(fake: FakeOrchestrator, address: str) -> None:
    user = {"role": "user", "content": "from stdin"}
    assert specdec("generate", "--address", address, "-", stdin="from stdin").exit_code == 0
    assert (
        specdec("generate", "--address", address, "--chat", "-", stdin="from stdin").exit_code == 0
    )
    assert specdec("generate", "--address", address, "--system", "s", "hi").exit_code == 0
    assert fake.requests == [
        build_request("from stdin", {}),
        build_request([user], {}),
        build_request([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}], {}),
    ]


def test_json_is_one_object(address: str) -> None:
    result = specdec("generate", "--address", address, "--json", "hi")
    assert result.exit_code == 0
    assert result.stderr == ""
    answer = json.loads(result.stdout)
    assert answer["text"] == "one two three!"
    assert answer["token_ids"] == [1, 2, 3, 4]
    assert answer["finish"] == {"reason": "stop", "matched": 4}
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["speculation"]["num_accepted_tokens_per_position"] == [1, 0]
    assert answer["timing"]["total_ms"] == 200
    assert answer["trace_id"] == TRACE_ID


def test_a_refusal_is_one_line(fake: FakeOrchestrator, address: str) -> None:
    fake.error = InvalidArgumentError("sampling.top_p", "must be in (0, 1]\n(got 2)")
    result = specdec("generate", "--address", address, "hi")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "error: INVALID_ARGUMENT INVALID_VALUE: sampling.top_p: must be in (0, 1] (got 2)\n"
    )


def test_a_refusal_says_when_to_try_again(fake: FakeOrchestrator, address: str) -> None:
    fake.error = ResourceExhaustedError("no room", reason="QUEUE_FULL", retry_after_ms=250)
    result = specdec("generate", "--address", address, "hi")
    assert result.stderr == (
        "error: RESOURCE_EXHAUSTED QUEUE_FULL: no room (try again in 250 ms)\n"
    )


def test_a_value_the_wire_cannot_carry_is_refused(address: str) -> None:
    result = specdec("generate", "--address", address, "--max-tokens", "-1", "hi")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: INVALID_ARGUMENT INVALID_VALUE: max_tokens: ")


def test_nobody_there(address: str) -> None:
    for command in (["generate", "hi"], ["info"]):
        result = specdec(*command, "--address", "127.0.0.1:1")
        assert result.exit_code == 1
        assert result.stderr.startswith("error: UNAVAILABLE: ")
        assert result.stderr.count("\n") == 1


def test_ctrl_c_cancels_the_call(fake: FakeOrchestrator, address: str) -> None:
    fake.is_endless = True
    # The handler is set here, because a shell's background jobs inherit SIGINT ignored.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from specdec.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "generate", "--address", address, "hi"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.read(3) == b"one"
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert fake.ended.wait(5)
    process.stdout.close()


def test_info(address: str) -> None:
    result = specdec("info", "--address", address)
    assert result.exit_code == 0
    assert "target model: toy\n" in result.stdout
    assert "drafter ngram: available (rejection, coupled)\n" in result.stdout
    assert json.loads(specdec("info", "--address", address, "--json").stdout)["vocab_size"] == 16


def test_each_source_has_its_colour() -> None:
    chunk = Chunk("ab", (Token(1, "a", "accepted"), Token(2, "b", "recovered")))
    assert coloured(chunk) == "\x1b[32ma\x1b[0m\x1b[31mb\x1b[0m"


def test_text_that_is_no_tokens_own_is_still_shown() -> None:
    assert coloured(Chunk("held back", ())) == "held back"


def test_colour_needs_a_terminal_and_no_veto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    leader, follower = os.openpty()
    with open(follower, "w") as terminal, open(os.devnull, "w") as file:
        assert use_colour(terminal)
        assert not use_colour(file)
        assert use_colour(file, forced=True)
        monkeypatch.setenv("NO_COLOR", "1")
        assert not use_colour(terminal)
        assert not use_colour(file, forced=True)
    os.close(leader)


def test_a_terminal_gets_colours_and_a_legend(address: str) -> None:
    leader, follower = os.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    process = subprocess.run(
        [sys.executable, "-m", "specdec.cli", "generate", "--address", address, "hi"],
        stdout=follower,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment | {"TERM": "xterm"},
        timeout=20,
        check=True,
    )
    os.close(follower)
    shown = os.read(leader, 4096)
    os.close(leader)
    assert b"\x1b[32m two\x1b[0m\x1b[31m three\x1b[0m" in shown
    assert process.stderr.startswith(b"tokens: ")


def test_summary_without_drafts(address: str) -> None:
    with Client(address) as client:
        line = summary(client.generate("hi").collect())
    assert "\n" not in line


@pytest.mark.parametrize(
    "flags",
    [
        ["--drafter", "model"],
        ["--drafter", "none", "--draft", "d"],
        ["--dtype", "int8"],
        ["--port", "65536"],
    ],
)
def test_up_refuses_what_cannot_run(flags: list[str]) -> None:
    assert specdec("up", *flags).exit_code == 2


def test_help_is_quick() -> None:
    started_at = time.monotonic()
    heavy = "{'torch', 'transformers', 'grpc', 'pydantic'} & set(__import__('sys').modules)"
    program = f"import specdec.cli; print({heavy} or 'light')"
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert output == "light\n"
    # Generous: the real figure is a third of a second, but machines that test are busy.
    assert time.monotonic() - started_at < 5
    assert specdec("--help").exit_code == 0
