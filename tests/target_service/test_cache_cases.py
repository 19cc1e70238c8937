"""What a step computes of prompts in chunks, warm and cold; batches in bfloat16."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specdec.models.loading import load_model
from specdec.paged.attention import PackedSequence
from specdec.paged.model import PagedModel
from tests.inline_target import InlineTarget, Request
from tests.toy_models import save_random_llama

VOCAB_SIZE = 64
BLOCK_SIZE = 4
CHUNK = 8
NUM_TOKENS = 6
# Where the stock model's two best logits in bfloat16 are closer, either may be chosen.
MAX_GAP = 0.15


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llama(tmp_path_factory.mktemp("model"))


def make_target(
    folder: Path, *, dtype: torch.dtype = torch.float32, prefix_cache: bool = True
) -> InlineTarget:
    model = PagedModel(
        load_model(folder, dtype, "cpu", report=lambda line: None),
        vocab_size=VOCAB_SIZE,
        num_blocks=256,
        block_size=BLOCK_SIZE,
        max_tokens=1024,
        prefix_cache=prefix_cache,
    )
    return InlineTarget(model, max_prefill_tokens=CHUNK)


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


class Spy:
    """Notes (rows, rows with logits) of every sequence in every forward."""

    def __init__(self, target: InlineTarget) -> None:
        self.seen: list[tuple[int, int]] = []
        model = target.engine._model
        forward = model.forward

        def watched(sequences: Sequence[PackedSequence], num_logits: Sequence[int]) -> torch.Tensor:
            rows = [len(sequence.token_ids) for sequence in sequences]
            self.seen += zip(rows, num_logits, strict=True)
            return forward(sequences, num_logits)

        model.forward = watched  # type: ignore[method-assign]  # taken off by target.close()


def first_round(target: InlineTarget, prompt: list[int], drafts: list[int]) -> Request:
    request = target.open(prompt)
    target.submit(request, drafts)
    while not target.step([request]):
        pass
    target.release(request)
    return request


def chunks(num_tokens: int) -> list[int]:
    whole, rest = divmod(num_tokens, CHUNK)
    return [CHUNK] * whole + ([rest] if rest else [])


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("length", [7, 8, 9, 16, 17])
def test_nothing_is_drawn_before_the_last_chunk_and_no_chunk_is_empty(
    folder: Path, length: int, num_drafts: int
) -> None:
    target, cold_target = make_target(folder), make_target(folder, prefix_cache=False)
    prompt, drafts = text(length), text(num_drafts, seed=1)
    cold = first_round(cold_target, prompt, drafts)
    spy = Spy(target)

    # Cold: the drafts come with the last chunk, and only there are logits.
    request = first_round(target, prompt, drafts)
    *before, last = chunks(length)
    assert spy.seen == [
        *((size, 0) for size in before),
        (last + num_drafts, 1 + num_drafts),
    ]
    assert request.token_ids == cold.token_ids

    # Warm. The prompt itself leaves the last token, as it must, or less than a block.
    spy.seen.clear()
    again = first_round(target, prompt, drafts)
    num_left = 1 if length % BLOCK_SIZE == 0 else length % BLOCK_SIZE
    assert again.results[0].num_cached_tokens == length - num_left
    assert spy.seen == [(num_left + num_drafts, 1 + num_drafts)]
    assert again.token_ids == cold.token_ids
    torch.testing.assert_close(
        target.first_logits[again.sequence_id].log_softmax(0),
        cold_target.first_logits[cold.sequence_id].log_softmax(0),
        rtol=0,
        atol=1e-5,
    )
    target.close()


@pytest.mark.parametrize("num_left", [0, 1])
@pytest.mark.parametrize("length", [8, 16])
def test_a_warm_prefix_that_leaves_no_token_or_one(
    folder: Path, length: int, num_left: int
) -> None:
    target, cold_target = make_target(folder), make_target(folder, prefix_cache=False)
    longer = text(length + num_left)
    target.generate(longer[:length], NUM_TOKENS)
    spy = Spy(target)
    request = first_round(target, longer, [])
    assert spy.seen == [(1, 1)]
    # With none left, the last token is computed again.
    assert request.results[0].num_cached_tokens == length - (1 - num_left)
    cold = first_round(cold_target, longer, [])
    assert request.token_ids == cold.token_ids
    torch.testing.assert_close(
        target.first_logits[request.sequence_id].log_softmax(0),
        cold_target.first_logits[cold.sequence_id].log_softmax(0),
        rtol=0,
        atol=1e-5,
    )
    target.close()


def generate_together(
    target: InlineTarget, prompts: list[list[int]], drafts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    """Runs all prompts in one batch; drafts hold the expected texts, maybe partly wrong."""
    requests = [target.open(prompt) for prompt in prompts]
    open_requests = list(enumerate(requests))
    for i, request in open_requests:
        target.submit(request, drafts[i][len(prompts[i]) :][: i % 4])
    while open_requests:
        finished = {id(request) for request in target.step(requests)}
        for i, request in list(open_requests):
            if id(request) not in finished:
                continue
            length = len(prompts[i]) + num_tokens
            if len(request.token_ids) < length:
                start = len(request.token_ids)
                draft = drafts[i][start : min(start + i % 4, length - 1)]
                target.submit(request, draft)
            else:
                del request.token_ids[length:]
                target.release(request)
                open_requests.remove((i, request))
    return [request.token_ids for request in requests]


@torch.inference_mode()
def test_in_bfloat16_company_changes_near_ties_only(folder: Path) -> None:
    """Whatever the batch, each token is the stock model's choice or nearly as good."""
    stock = load_model(folder, torch.bfloat16, "cpu", report=lambda line: None)
    target = make_target(folder, dtype=torch.bfloat16)
    prompts = [text(1 + 3 * i, seed=i) for i in range(16)]
    alone = [target.generate(prompt, 12).token_ids for prompt in prompts]
    rng = random.Random(0)
    spoilt = [
        [token if rng.random() < 0.8 else rng.randrange(VOCAB_SIZE) for token in tokens]
        for tokens in alone
    ]
    for size in (3, 16):
        for first in range(0, len(prompts), size):
            part = slice(first, first + size)
            texts = generate_together(target, prompts[part], spoilt[part], 12)
            for prompt, tokens in zip(prompts[part], texts, strict=True):
                logits = stock(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
                logits = logits[len(prompt) - 1 : -1]
                chosen = logits.gather(1, torch.tensor(tokens[len(prompt) :])[:, None])[:, 0]
                assert float((logits.max(dim=1).values - chosen).max()) <= MAX_GAP
    assert target.engine.stats.max_batch_size == 16
    target.close()
