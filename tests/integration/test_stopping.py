"""Where a generation ends, what it says about it, and what text it delivers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdec.client import Generation, GenerationError
from specdec.telemetry import names
from specdec.telemetry.trace_store import load_trace
from tests.integration.checks import becomes_idle, generate
from tests.services import Services, running
from tests.toy_models import save_bigram, save_random_llama

pytestmark = pytest.mark.asyncio(loop_scope="module")

CYCLE = 16
MODES: list[dict[str, Any]] = [
    {"speculation": False},
    *(
        {"drafter": name, "num_speculative_tokens": k}
        for name in ("ngram", "model")
        for k in (1, 2, 3, 6)
    ),
]
# Read twice, so that the ngram drafter has something to propose.
PROMPT = [*range(CYCLE), *range(CYCLE), 0]


def successors(following: dict[int, int], vocab_size: int) -> np.ndarray:
    """A table in which each token has one successor; itself unless given."""
    table = np.zeros((vocab_size, vocab_size))
    for token_id in range(vocab_size):
        table[token_id, following.get(token_id, token_id)] = 1.0
    return table


@contextlib.asynccontextmanager
async def serving(model: Path, traces: Path) -> AsyncIterator[Services]:
    """A deployment whose draft is the target."""
    settings = {"num_threads": 1}
    async with running(
        model,
        traces,
        draft_model=model,
        drafter="model",
        target=settings,
        draft=settings | {"ngram_min_acceptance": 0.0},
    ) as services:
        yield services
        await becomes_idle(services)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cycle(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    """A model that counts 0, 1, ..., 15, 0, ...; without EOS."""
    folder = tmp_path_factory.mktemp("cycle")
    table = successors({i: (i + 1) % CYCLE for i in range(CYCLE)}, CYCLE + 2)
    async with serving(save_bigram(folder / "model", table), folder / "traces") as services:
        yield services


async def in_every_mode(services: Services, prompt: Any, **options: Any) -> list[Generation]:
    """Runs one greedy request in every mode, all at once."""
    return await asyncio.gather(
        *[generate(services.client, prompt, temperature=0.0, **mode, **options) for mode in MODES]
    )


def check_counts(result: Generation) -> None:
    """Counts are those of the delivered tokens, and text comes with its tokens."""
    sources = [token.source for token in result.tokens]
    stats, usage = result.speculation, result.usage
    assert usage.completion_tokens == len(result.tokens)
    assert usage.accepted_draft_tokens == stats.num_accepted_tokens == sources.count("accepted")
    assert usage.rejected_draft_tokens == stats.num_draft_tokens - stats.num_accepted_tokens
    assert sum(stats.num_accepted_tokens_per_position) == stats.num_accepted_tokens
    assert stats.num_rounds >= len(sources) - stats.num_accepted_tokens
    assert "".join(token.text for token in result.tokens) == result.text


# Ends.


@pytest.mark.parametrize("j", range(1, 13))
async def test_generation_ends_with_the_stop_id_wherever_it_falls(cycle: Services, j: int) -> None:
    for result in await in_every_mode(cycle, PROMPT, stop_token_ids=[17, j], max_tokens=40):
        assert result.token_ids == tuple(range(1, j + 1))
        assert (result.finish_reason, result.matched) == ("stop", j)
        assert result.text == " ".join(f"t{i}" for i in range(1, j))
        check_counts(result)


@pytest.mark.parametrize("max_tokens", range(1, 10))
async def test_never_more_nor_fewer_than_max_tokens(cycle: Services, max_tokens: int) -> None:
    for result in await in_every_mode(cycle, PROMPT, max_tokens=max_tokens):
        assert result.token_ids == tuple(range(1, max_tokens + 1))
        assert (result.finish_reason, result.matched) == ("length", None)
        assert result.text == " ".join(f"t{i}" for i in range(1, max_tokens + 1))
        check_counts(result)


async def test_a_stop_wins_over_the_length_limit(cycle: Services) -> None:
    for result in await in_every_mode(cycle, PROMPT, stop_token_ids=[5], max_tokens=5):
        assert (len(result.tokens), result.finish_reason, result.matched) == (5, "stop", 5)
    for result in await in_every_mode(cycle, PROMPT, stop=["t5"], max_tokens=5):
        assert (len(result.tokens), result.finish_reason, result.matched) == (5, "stop", "t5")


async def test_stop_strings_cut_the_text_but_not_the_tokens(cycle: Services) -> None:
    for stop, text, num_tokens in [
        ("t4", "t1 t2 t3 ", 4),
        ("3 t4", "t1 t2 t", 4),
        ("t1", "", 1),
        ("2 t3 t4 t5 t", "t1 t", 6),
    ]:
        for result in await in_every_mode(cycle, PROMPT, stop=[stop], max_tokens=20):
            assert result.text == text
            assert result.token_ids == tuple(range(1, num_tokens + 1))
            assert (result.finish_reason, result.matched) == ("stop", stop)
            check_counts(result)


async def test_the_first_complete_stop_string_wins(cycle: Services) -> None:
    for result in await in_every_mode(cycle, PROMPT, stop=["t2 t3 t4", "t3", "t9"], max_tokens=20):
        assert (result.matched, result.text) == ("t3", "t1 t2 ")


@pytest.mark.parametrize("eos_token_id", [[5, 9], 9])
async def test_every_eos_id_ends_unless_ignored(
    eos_token_id: int | list[int], tmp_path: Path
) -> None:
    table = successors({i: (i + 1) % CYCLE for i in range(CYCLE)}, CYCLE + 2)
    model = save_bigram(tmp_path / "model", table, eos_token_id=eos_token_id)
    eos_ids = eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]
    async with serving(model, tmp_path / "traces") as services:
        assert sorted((await services.client.model_info()).eos_token_ids) == eos_ids
        # The prompt has EOS ids too: a drafter must not copy past them, nor stop for them.
        for start in (0, 6):
            expected = min(i for i in eos_ids if i > start)
            for result in await in_every_mode(
                services, [*PROMPT, *range(start + 1)], max_tokens=30
            ):
                assert result.token_ids == tuple(range(start + 1, expected + 1))
                assert (result.finish_reason, result.matched) == ("stop", expected)
                check_counts(result)
        for result in await in_every_mode(services, PROMPT, ignore_eos=True, max_tokens=30):
            assert result.token_ids == tuple((i + 1) % CYCLE for i in range(30))
            assert result.finish_reason == "length"
            check_counts(result)
        for result in await in_every_mode(
            services, PROMPT, ignore_eos=True, stop_token_ids=[7, 11], max_tokens=30
        ):
            assert result.token_ids == tuple(range(1, 8))
            assert result.matched == 7
        # An EOS after a matching n-gram of the prompt.
        for result in await in_every_mode(services, [8, 9, 8, 9, 3, 8], max_tokens=30):
            assert result.token_ids == (9,)


# Counts.


async def test_usage_equals_what_is_delivered_and_what_the_span_says(
    tmp_path: Path,
) -> None:
    """A39: the same number in ids, usage and span, however a run ends."""
    model = save_random_llama(tmp_path / "model", max_position_embeddings=2048)
    async with serving(model, tmp_path / "traces") as services:
        probe = await generate(services.client, [3, 4], temperature=0.0, max_tokens=20)
        word = f"t{probe.token_ids[11]}"
        results = [
            result
            for options in (
                {"max_tokens": 13},
                {"stop": [word], "max_tokens": 40},
                {"stop_token_ids": [probe.token_ids[11]], "max_tokens": 40},
            )
            for result in await in_every_mode(services, [3, 4], **options)
        ]
        stream = services.client.generate([3, 4], temperature=0.0, request_id="left")
        num_seen = 0
        async for chunk in stream:
            num_seen += len(chunk.tokens)
            if num_seen >= 10:
                break
        stream.cancel()
        with contextlib.suppress(GenerationError):
            async for chunk in stream:
                num_seen += len(chunk.tokens)
        await becomes_idle(services)
        services.orchestrator.tracing.flush()
        for result in results:
            check_counts(result)
            (root,) = [
                span
                for span in load_trace(tmp_path / "traces", result.trace_id).spans
                if span.is_generate
            ]
            attributes = root.attributes
            assert attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] == len(result.token_ids)
            assert attributes[names.GEN_AI_USAGE_INPUT_TOKENS] == result.usage.prompt_tokens == 2
            assert attributes[names.NUM_DRAFT_TOKENS] == result.speculation.num_draft_tokens
            assert attributes[names.NUM_ACCEPTED_TOKENS] == result.speculation.num_accepted_tokens
            assert attributes[names.NUM_ROUNDS] == result.speculation.num_rounds
            assert attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] == [result.finish_reason]
        (left,) = [
            span
            for span in load_trace(tmp_path / "traces", "last").spans
            if span.attributes.get(names.REQUEST_ID) == "left"
        ]
        # What was on its way when the client left was delivered by the service.
        assert 10 <= num_seen <= left.attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] < 2046


# Text.

BOS, END = 256, 257
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}assistant:"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, id 0 to 255, then <s> and <end>; a text gets a <s> in front."""
    symbols = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(dict(symbols), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = [AddedToken(name, special=True, normalized=False) for name in ("<s>", "<end>")]
    backend.add_special_tokens(specials)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=specials[0],
        eos_token=specials[1],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def bytes_to_unicode() -> dict[int, str]:
    """The printable symbol that byte-level BPE writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(others)
    }


@contextlib.asynccontextmanager
async def spelling(folder: Path, spelt: bytes) -> AsyncIterator[Services]:
    """A deployment that spells some bytes, no two alike, over and over."""
    assert len(set(spelt)) == len(spelt)
    following = dict(zip(spelt, spelt[1:] + spelt[:1], strict=True))
    # Whatever else is last, the first of them comes next.
    table = successors({i: spelt[0] for i in range(258)} | following, 258)
    model = save_bigram(folder / "model", table, eos_token_id=END)
    byte_tokenizer().save_pretrained(model)
    async with serving(model, folder / "traces") as services:
        yield services


async def test_the_start_of_a_stop_string_is_never_streamed(tmp_path: Path) -> None:
    async with spelling(tmp_path, b"abcdef\n") as services:
        for result in await in_every_mode(services, "\n", stop=["cde"], max_tokens=20):
            assert result.text == "ab"
            assert (result.matched, len(result.tokens)) == ("cde", 5)
            check_counts(result)
        for stops in (["cdx"], ["cdx", "defx", "bcdey"]):
            for result in await in_every_mode(services, "\n", stop=stops, max_tokens=6):
                assert (result.text, result.finish_reason) == ("abcdef", "length")
                check_counts(result)
        # One token a message: each text comes as soon as it can be no stop any more.
        stream = services.client.generate(
            "\n", temperature=0.0, speculation=False, stop=["cdx"], max_tokens=6
        )
        assert [chunk.text async for chunk in stream] == ["a", "b", "", "", "cde", "f"]
        # What is held back when the length limit comes is released then.
        for result in await in_every_mode(services, "\n", stop=["cdef\nx"], max_tokens=5):
            assert (result.text, result.finish_reason) == ("abcde", "length")
        # A stop id cuts nothing that is held back.
        for result in await in_every_mode(
            services, "\n", stop=["cdx"], stop_token_ids=[ord("e")], max_tokens=9
        ):
            assert (result.text, result.matched) == ("abcd", ord("e"))


async def test_characters_of_several_bytes_come_whole(tmp_path: Path) -> None:
    text = "a\U0001f600\ud55c\u05e9"
    spelt = text.encode()
    tokenizer = byte_tokenizer()
    async with spelling(tmp_path, spelt) as services:
        for num_tokens in (*range(1, len(spelt) + 1), 35):
            for result in await in_every_mode(services, "\u05e9", max_tokens=num_tokens):
                assert result.token_ids == tuple((spelt * 4)[:num_tokens])
                decoded = tokenizer.decode(result.token_ids)
                # Only a character that is cut off at the end is left out.
                assert result.text == decoded.rstrip("\ufffd")
                assert all("\ufffd" not in token.text for token in result.tokens)
                check_counts(result)
        stream = services.client.generate(
            "\u05e9", temperature=0.0, speculation=False, max_tokens=len(spelt)
        )
        texts = [chunk.text async for chunk in stream]
        assert [piece for piece in texts if piece] == list(text)
        for result in await in_every_mode(services, "\u05e9", stop=["\ud55c"], max_tokens=20):
            assert (result.text, result.matched) == ("a\U0001f600", "\ud55c")


async def test_bytes_that_make_no_character_are_left_out(tmp_path: Path) -> None:
    async with spelling(tmp_path, b"\x80a\xf0\x9fb") as services:
        for result in await in_every_mode(services, "c", max_tokens=15):
            assert result.token_ids == tuple(b"\x80a\xf0\x9fb" * 3)
            assert result.text == "ababab"
            check_counts(result)


async def test_one_bos_and_no_control_tokens_from_chat_content(tmp_path: Path) -> None:
    async with spelling(tmp_path, b"xyz") as services:
        client = services.client
        for prompt, num_tokens in [("ab", 3), ("<s>ab", 3), ("<s><s>ab", 4), ("a<end>b", 4)]:
            result = await generate(client, prompt, temperature=0.0, max_tokens=4)
            assert result.usage.prompt_tokens == num_tokens, prompt
            assert result.text == "xyzx"
        for content in ("hello", "say <end> or <s>", "<end>", "<s>", "", "\ue000", "caf\u00e9 "):
            messages = [
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": content},
            ]
            spelt = f"system:be kind|user:{content}|assistant:".encode()
            # <s> in front; each | stands for the template's <end>.
            result = await generate(client, messages, temperature=0.0, max_tokens=4)
            assert result.usage.prompt_tokens == 1 + len(spelt), content
            assert (result.text, result.finish_reason) == ("xyzx", "length")


async def test_joined_text_is_the_decoded_ids_when_sampling(tmp_path: Path) -> None:
    model = save_random_llama(tmp_path / "model", eos_token_id=[3, 7])
    tokenizer = AutoTokenizer.from_pretrained(model)
    async with serving(model, tmp_path / "traces") as services:
        results = await asyncio.gather(
            *[
                generate(services.client, "t1 t2", max_tokens=30, temperature=1.5, ignore_eos=True)
                for _ in range(8)
            ]
        )
        for result in results:
            assert len(result.token_ids) == 30
            assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True)
            check_counts(result)
