"""KV of earlier requests gives what computing it again would give."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

from specdec.models.loading import load_model
from specdec.paged.block_pool import BlockPool
from specdec.paged.model import PagedModel
from specdec.types import SamplingParams
from tests.inline_target import InlineTarget, Request
from tests.toy_models import save_random_llama

NUM_BLOCKS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_llama(tmp_path_factory.mktemp("model"))


def make_target(
    folder: Path, *, block_size: int = 16, prefix_cache: bool = True, chunk: int = 24
) -> InlineTarget:
    model = PagedModel(
        load_model(folder, torch.float32, "cpu", report=lambda line: None),
        vocab_size=64,
        num_blocks=NUM_BLOCKS,
        block_size=block_size,
        max_tokens=NUM_BLOCKS * block_size,
        prefix_cache=prefix_cache,
    )
    return InlineTarget(model, max_prefill_tokens=chunk)


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(64) for _ in range(length)]


def check_equal(
    target: InlineTarget, warm: Request, cold_target: InlineTarget, cold: Request
) -> None:
    assert warm.token_ids == cold.token_ids
    torch.testing.assert_close(
        target.first_logits[warm.sequence_id].log_softmax(0),
        cold_target.first_logits[cold.sequence_id].log_softmax(0),
        rtol=0,
        atol=1e-5,
    )


def num_cached(request: Request) -> int:
    return request.results[0].num_cached_tokens


@pytest.mark.parametrize("num_full", [1, 2, 3, 4])
def test_prompts_around_a_block_boundary_in_every_order(folder: Path, num_full: int) -> None:
    lengths = [num_full * 16 - 1, num_full * 16, num_full * 16 + 1]
    cold_target = make_target(folder, prefix_cache=False)
    cold = {length: cold_target.generate(text(length), 20) for length in lengths}
    for order in itertools.permutations(lengths):
        target = make_target(folder)
        for _ in range(3):
            for length in order:
                check_equal(target, target.generate(text(length), 20), cold_target, cold[length])
        # What can be reused is: all but the last token, and that a block only as a whole.
        reused = [num_cached(target.generate(text(length), 1)) for length in lengths]
        assert reused == [(num_full - 1) * 16, num_full * 16 - 1, num_full * 16]
        target.close()


def test_drafts_that_were_not_retained_are_not_shared(folder: Path) -> None:
    """Wrong drafts, then the same prompt again, and one that goes on as the drafts did."""
    target, cold_target = make_target(folder), make_target(folder, prefix_cache=False)
    prompt = text(30)
    expected = cold_target.generate(prompt, 40)
    wrong = [*prompt, *text(40, seed=9)]
    check_equal(target, target.generate(prompt, 40, wrong), cold_target, expected)
    check_equal(target, target.generate(prompt, 40, wrong), cold_target, expected)
    other = cold_target.generate(wrong, 10)
    check_equal(target, target.generate(wrong, 10), cold_target, other)
    target.close()


def test_a_resumed_conversation_reuses_the_answer_too(folder: Path) -> None:
    target, cold_target = make_target(folder), make_target(folder, prefix_cache=False)
    history = text(20)
    for turn in range(4):
        cold = cold_target.generate(history, 25)
        warm = target.generate(history, 25, cold.token_ids)
        check_equal(target, warm, cold_target, cold)
        if turn:
            # All of the last turn but its last token, which was never computed.
            assert num_cached(warm) == (len(history) - 11) // 16 * 16
        history = [*warm.token_ids, *text(10, seed=turn)]
    target.close()


def test_tenants_share_nothing(folder: Path) -> None:
    target = make_target(folder)
    prompt = text(40)
    first = target.generate(prompt, 8, salt=b"one")
    assert num_cached(target.generate(prompt, 8, salt=b"two")) == 0
    again = target.generate(prompt, 8, salt=b"one")
    assert (num_cached(again), again.token_ids) == (32, first.token_ids)
    target.close()


def test_short_hashes_cost_hits_and_nothing_else(folder: Path) -> None:
    """Hashes of 8 bits collide all the time; the tokens are compared too."""
    target = make_target(folder, block_size=4)
    cold_target = make_target(folder, block_size=4, prefix_cache=False)
    model = target.engine._model
    pool = BlockPool(NUM_BLOCKS, 4, copy_block=model.kv.copy_block, hash_bytes=1)
    model.block_pool = target.engine._pool = target.engine._scheduler._pool = pool
    rng = random.Random(3)
    prompts = [text(rng.randrange(5, 30), seed=rng.randrange(60)) for _ in range(500)]
    num_hits = 0
    for prompt in prompts:
        warm, cold = target.generate(prompt, 3), cold_target.generate(prompt, 3)
        check_equal(target, warm, cold_target, cold)
        num_hits += num_cached(warm) > 0
    assert num_hits > 50
    target.close()


def test_sampled_output_is_the_same_from_a_warm_cache(folder: Path) -> None:
    target, cold_target = make_target(folder), make_target(folder, prefix_cache=False)
    params = SamplingParams(temperature=1.0)
    for seed in range(6):
        cold = cold_target.generate(text(33), 20, params=params, seed=seed)
        warm = target.generate(text(33), 20, params=params, seed=seed)
        check_equal(target, warm, cold_target, cold)
    target.close()


def test_the_cache_gives_way_to_running_sequences(folder: Path) -> None:
    target = make_target(folder, block_size=4)
    for seed in range(40):  # far more than the pool holds
        target.generate(text(30, seed=seed), 10)
    assert target.engine.num_cached_blocks <= NUM_BLOCKS
    assert num_cached(target.generate(text(30, seed=39), 1)) == 28
    assert num_cached(target.generate(text(30, seed=0), 1)) == 0
    target.close()


def test_a_long_prompt_holds_nobody_up(folder: Path) -> None:
    """While it is prefilled in chunks, every step still carries the other stream's round."""
    target = make_target(folder, chunk=8)
    stream, long = target.open(text(5)), target.open(text(200, seed=1))
    target.submit(stream)
    while not target.step([stream]):
        pass
    target.submit(long)
    steps_between = []
    while not long.num_rounds:
        target.submit(stream)
        before = target.engine.stats.num_steps
        finished: list[Request] = []
        while stream not in finished:
            finished += target.step([stream, long])
        steps_between.append(target.engine.stats.num_steps - before)
    assert len(steps_between) >= 200 // 8
    assert max(steps_between) == 1
    target.release(stream)
    target.release(long)
    target.close()
