"""Bias, masks and penalties: by hand, and against transformers' processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.logits import Prefix, adjust_logits
from specdec.sampling import probs_from_logits
from specdec.types import SamplingParams

VOCAB_SIZE = 12


def adjusted(logits: list[float], prefix: Prefix, **params: Any) -> list[float]:
    row = torch.tensor([logits], dtype=torch.float64)
    return adjust_logits(row, [SamplingParams(**params)], [prefix])[0].tolist()


def test_penalties_by_hand() -> None:
    prefix = Prefix([0, 1, 2, 2], num_prompt_tokens=2, drafts=[2, 3])
    # Ids 0 and 1 are prompt; 2 is three times in the output, 3 once, 4 nowhere.
    result = adjusted(
        [2.0, -2.0, 4.0, -1.0, 5.0],
        prefix,
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=1.0,
    )
    assert result == [1.0, -4.0, 2.0 - 1.5 - 1.0, -2.0 - 0.5 - 1.0, 5.0]


def test_a_draft_counts_only_in_rows_that_stand_on_it() -> None:
    params = [SamplingParams(frequency_penalty=1.0)] * 3
    prefixes = [Prefix([7, 2], 1, [3, 3][:j]) for j in range(3)]
    rows = adjust_logits(torch.zeros(3, 8, dtype=torch.float64), params, prefixes)
    assert rows[:, 2].tolist() == [-1.0] * 3  # committed
    assert rows[:, 3].tolist() == [0.0, -1.0, -2.0]
    assert rows[:, 7].tolist() == [0.0] * 3  # prompt


def test_masks_by_hand() -> None:
    inf = float("inf")
    logits = [0.0, 1.0, 2.0, 3.0]
    prefix = Prefix([3, 0, 1], 1, [2])
    assert adjusted(logits, prefix, allowed_token_ids=(1, 3)) == [-inf, 1.0, -inf, 3.0]
    ends = {"end_token_ids": (2, 3)}
    assert adjusted(logits, prefix, min_tokens=3, **ends) == logits  # three are there
    assert adjusted(logits, prefix, min_tokens=4, **ends) == [0.0, 1.0, -inf, -inf]
    assert adjusted(logits, prefix, bad_word_token_ids=((3,),)) == [0.0, 1.0, 2.0, -inf]
    assert adjusted(logits, prefix, bad_word_token_ids=((1, 2, 0),)) == [-inf, 1.0, 2.0, 3.0]
    assert adjusted(logits, prefix, bad_word_token_ids=((2, 2, 0),)) == logits
    # The prompt is not output.
    assert adjusted(logits, prefix, bad_word_token_ids=((3, 0, 1, 2, 0),)) == logits
    assert adjusted(logits, prefix, logit_bias=((0, 9.0), (3, -1.0))) == [9.0, 1.0, 2.0, 2.0]


def test_rows_that_ask_for_nothing_keep_their_bits() -> None:
    logits = torch.randn(4, VOCAB_SIZE)
    prefix = Prefix([1, 2, 3], 1)
    plain, shaped = SamplingParams(), SamplingParams(repetition_penalty=1.3, logit_bias=((1, 1.0),))
    mixed = adjust_logits(logits, [plain, shaped, plain, shaped], [None, prefix, None, prefix])
    assert torch.equal(mixed[[0, 2]], logits[[0, 2]])
    assert not torch.equal(mixed[[1, 3]], logits[[1, 3]])
    assert adjust_logits(logits, [plain] * 4, None) is logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_min_p_keeps_its_share_of_the_largest(dtype: torch.dtype) -> None:
    probs = torch.tensor([[0.5, 0.25, 0.15, 0.1]], dtype=dtype)
    kept = probs_from_logits(probs.log(), [SamplingParams(min_p=0.4)])[0]
    torch.testing.assert_close(kept, torch.tensor([2 / 3, 1 / 3, 0.0, 0.0], dtype=dtype))
    assert probs_from_logits(probs.log(), [SamplingParams(min_p=1.0)])[0].tolist() == [1, 0, 0, 0]


ids = st.integers(0, VOCAB_SIZE - 1)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    prompt=st.lists(ids, min_size=1, max_size=6),
    output=st.lists(ids, max_size=6),
    num_drafts=st.integers(0, 3),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.7]),
    bias=st.dictionaries(ids, st.sampled_from([-3.0, 0.5, 4.0]), max_size=3),
    banned=st.sets(ids, max_size=3),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3),
)
def test_the_pipeline_is_that_of_transformers(
    seed: int,
    prompt: list[int],
    output: list[int],
    num_drafts: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    bias: dict[int, float],
    banned: set[int],
    bad_words: list[list[int]],
) -> None:
    """In one order, for what both have with one meaning."""
    # Transformers looks for bad words in the prompt too: it is not to end like one.
    if any(word[:-1] and set(word[:-1]) & set(prompt) for word in bad_words):
        bad_words = []
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)).double()
    tokens = torch.tensor([prompt + output])
    processors = LogitsProcessorList()
    if bias:
        processors.append(SequenceBiasLogitsProcessor([[[k], v] for k, v in bias.items()]))
    allowed = tuple(i for i in range(VOCAB_SIZE) if i not in banned)
    if banned:
        processors.append(SuppressTokensLogitsProcessor(sorted(banned)))
    if bad_words:
        processors.append(NoBadWordsLogitsProcessor(bad_words))
    processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    expected = processors(tokens, logits.clone()).softmax(dim=1)
    if not expected.isfinite().all():
        return  # everything masked: such requests are refused before
    split = max(0, len(output) - num_drafts)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        logit_bias=tuple(bias.items()),
        allowed_token_ids=allowed if banned else (),
        bad_word_token_ids=tuple(map(tuple, bad_words)),
    )
    prefix = Prefix(prompt + output[:split], len(prompt), output[split:])
    result = probs_from_logits(logits, [params], [prefix])
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
