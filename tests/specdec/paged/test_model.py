"""The packed forward over the paged pool against stock transformers, in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Lfm2Config,
    MambaConfig,
    PreTrainedConfig,
)

from specdec.models.loading import ModelError, load_model
from specdec.paged import attention
from specdec.paged.attention import AttentionOptions, PackedSequence
from specdec.paged.model import PagedModel
from specdec.paged.self_check import check_logits, stock_logits
from tests.toy_models import save_random_llama, save_random_qwen2, toy_tokenizer

VOCAB_SIZE = 64
BLOCK_SIZE = 4
NUM_BLOCKS = 96


def open_paged(folder: Path, vocab_size: int = VOCAB_SIZE) -> PagedModel:
    return PagedModel(
        load_model(folder, torch.float32, "cpu", report=lambda line: None),
        vocab_size=vocab_size,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_tokens=NUM_BLOCKS * BLOCK_SIZE,
    )


class Reference:
    """Stock transformers, a whole sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        return self._model(torch.tensor([token_ids])).logits[0]


@pytest.fixture(scope="module", params=[save_random_llama, save_random_qwen2])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    save: Callable[[Path], Path] = request.param
    return save(tmp_path_factory.mktemp("model"))


def random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_ragged_chunks_in_shuffled_blocks(folder: Path) -> None:
    """Prefill chunks, verifies and single rows of many sequences, step by step."""
    rng = random.Random(1)
    model, reference = open_paged(folder), Reference(folder)
    texts = [random_ids(rng, length) for length in (1, 3, 4, 5, 16, 17, 33, 50, 100)]
    expected = [reference.logits(text) for text in texts]
    blocks = list(range(NUM_BLOCKS))
    rng.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-len(text) // BLOCK_SIZE))] for text in texts]
    computed = [0] * len(texts)
    while any(done < len(text) for done, text in zip(computed, texts, strict=True)):
        packed, num_logits, wanted = [], [], []
        order = [i for i in range(len(texts)) if computed[i] < len(texts[i])]
        rng.shuffle(order)
        for i in order[: rng.randint(1, len(order))]:
            start = computed[i]
            count = min(rng.choice([1, 1, 2, 5, 6, 13, 90]), len(texts[i]) - start)
            packed.append(PackedSequence(texts[i][start : start + count], start, tables[i]))
            num_logits.append(rng.choice([0, 1, count]))
            wanted.append(expected[i][start + count - num_logits[-1] : start + count])
            computed[i] += count
        logits = model.forward(packed, num_logits)
        assert logits.dtype == torch.float32
        assert logits.shape == (sum(num_logits), VOCAB_SIZE)
        assert_close(logits, torch.cat(wanted))


def test_rows_after_a_rollback_are_written_over(folder: Path) -> None:
    rng = random.Random(2)
    model, reference = open_paged(folder), Reference(folder)
    text, table = random_ids(rng, 10), [7, 3, 20, 1, 30]
    model.forward([PackedSequence(text + random_ids(rng, 8), 0, table)], [0])
    fresh = random_ids(rng, 6)
    logits = model.forward([PackedSequence(fresh, 10, table)], [6])
    assert_close(logits, reference.logits(text + fresh)[10:])


def test_what_lies_in_other_blocks_and_behind_the_end_does_not_leak(folder: Path) -> None:
    rng = random.Random(3)
    model = open_paged(folder)
    text, table = random_ids(rng, 11), [5, 2, 9]
    clean = model.forward([PackedSequence(text, 0, table)], [11])
    for tensor in (*model.kv._keys, *model.kv._values):
        mine = tensor[table].clone()
        tensor[: model.kv.null_block].normal_(0.0, 1e4)
        tensor[table] = mine
        tensor[9, 3] = 1e4  # position 11, past the last token
    # Beside longer and shorter neighbours, the last row again.
    packed = [
        PackedSequence(random_ids(rng, 20), 0, [10, 11, 12, 13, 14]),
        PackedSequence(text[-1:], 10, table),
        PackedSequence(random_ids(rng, 1), 0, [15]),
    ]
    assert_close(model.forward(packed, [0, 1, 0]), clean[-1:])


def test_a_nan_in_another_block_does_not_reach_a_neighbour(folder: Path) -> None:
    rng = random.Random(4)
    model = open_paged(folder)
    text = random_ids(rng, 6)
    clean = model.forward([PackedSequence(text, 0, [0, 1])], [6])
    for tensor in (*model.kv._keys, *model.kv._values):
        tensor[2:4] = torch.nan
    packed = [
        PackedSequence(text[-1:], 5, [0, 1]),
        PackedSequence(random_ids(rng, 1), 7, [2, 3]),
    ]
    logits = model.forward(packed, [1, 1])
    assert_close(logits[:1], clean[-1:])
    assert not torch.isfinite(logits[1]).any()


def test_a_cleared_block_can_be_used_again(folder: Path) -> None:
    rng = random.Random(5)
    model, reference = open_paged(folder), Reference(folder)
    for tensor in (*model.kv._keys, *model.kv._values):
        tensor[2:4] = torch.nan
    model.kv.clear([2, 3])
    text = random_ids(rng, 6)
    logits = model.forward([PackedSequence(text, 0, [3, 2])], [6])
    assert_close(logits, reference.logits(text))


def test_padded_embeddings_give_no_logits_beyond_the_vocabulary(tmp_path: Path) -> None:
    folder = save_random_llama(tmp_path, vocab_size=60, padded_vocab_size=64)
    logits = open_paged(folder, vocab_size=60).forward([PackedSequence([1, 2], 0, [0])], [2])
    assert logits.shape == (2, 60)
    assert_close(logits, Reference(folder).logits([1, 2])[:, :60])


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4),
        MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2),
        Lfm2Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            full_attn_idxs=[1],
        ),
    ],
    ids=["no interface", "recurrent", "partly recurrent"],
)
def test_what_keeps_state_elsewhere_is_refused(tmp_path: Path, config: PreTrainedConfig) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    toy_tokenizer(VOCAB_SIZE).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"attention of our own|attend through|cannot roll back"):
        open_paged(tmp_path)


def test_wrong_attention_is_found_at_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that is not known would be ignored without a sign."""
    model = load_model(folder, torch.float32, "cpu", report=lambda line: None)
    expected = stock_logits(model, VOCAB_SIZE)
    check_logits(open_paged(folder), expected, "Toy")

    def capped(**options: Any) -> AttentionOptions:
        return AttentionOptions(**{**options, "softcap": 1.0})

    monkeypatch.setattr(attention, "AttentionOptions", capped)
    with pytest.raises(ModelError, match="Toy cannot be served exactly"):
        check_logits(open_paged(folder), expected, "Toy")
