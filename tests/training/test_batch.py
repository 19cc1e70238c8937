from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.models.loading import load_tokenizer
from specdec.paged.loading import LoadedModel, load_paged_model
from specdec.randomness import derive_keys
from specdec.types import FinishReason, SamplingParams
from tests.toy_models import save_random_llama
from training.batch import Batch, BatchError, Continuation

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0)
OPENING = list(range(10, 30))


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    return load_paged_model(
        str(save_random_llama(tmp_path)),
        dtype="float32",
        device="cpu",
        num_blocks=64,
        block_size=BLOCK_SIZE,
        max_sequences=2,
        report=lambda line: None,
    )


def new_batch(loaded: LoadedModel) -> Batch:
    return Batch(loaded, load_tokenizer(loaded.folder).backend_tokenizer, max_size=2)


def run(batch: Batch) -> list[Continuation]:
    ended = []
    while batch.num_running:
        ended += batch.step()
        batch._engine.check_integrity()
    return ended


def test_a_sequence_that_ends_makes_room(loaded: LoadedModel) -> None:
    batch = new_batch(loaded)
    for sequence_id, max_tokens in ((7, 2), (8, 5)):
        keys = derive_keys(0, choice=sequence_id)
        batch.start(sequence_id, [1, 2, 3], GREEDY, keys, max_tokens=max_tokens)
    assert not batch.has_room
    assert batch.step() == []
    (first,) = batch.step()
    assert (first.sequence_id, first.finish.reason) == (7, FinishReason.LENGTH)
    assert batch.has_room
    batch.start(9, [1, 2, 3], GREEDY, derive_keys(0, choice=9), max_tokens=5)
    second, third = run(batch)
    assert second.token_ids == third.token_ids
    assert second.token_ids[:2] == first.token_ids
    assert second.text == " ".join(f"t{token_id}" for token_id in second.token_ids)
    assert batch.num_decoded_tokens == 12


def test_a_shared_opening_is_computed_once(loaded: LoadedModel) -> None:
    batch = new_batch(loaded)
    num_rows = []
    for sequence_id in range(2):
        before = batch._engine.stats.num_tokens
        keys = derive_keys(0, choice=sequence_id)
        batch.start(sequence_id, [*OPENING, sequence_id], GREEDY, keys, max_tokens=1)
        run(batch)
        num_rows.append(batch._engine.stats.num_tokens - before)
    assert num_rows == [21, 1]


def test_logits_that_are_not_finite_are_an_error(loaded: LoadedModel) -> None:
    batch = new_batch(loaded)
    loaded.model._model.get_input_embeddings().weight.fill_(torch.nan)
    batch.start(1, [1], GREEDY, derive_keys(0, choice=1), max_tokens=1)
    with pytest.raises(BatchError, match="sequence 1 could not be computed: non_finite_logits"):
        run(batch)
