from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from specdec.models import loading
from specdec.models.loading import ModelError
from tests.toy_models import (
    save_bigram,
    save_noisy_copy,
    save_random_llama,
    save_random_qwen2,
    toy_tokenizer,
)


def quiet(line: str) -> None:
    del line


def load(folder: Path) -> Any:
    return loading.load_model(folder, torch.float32, "cpu", quiet)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_random_llama(tmp_path / "llama", eos_token_id=[5, 7])


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    assert loading.resolve_model(str(tmp_path), quiet) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./no", "a/b/c", "", "../x"])
def test_a_missing_folder_is_named(name: str) -> None:
    with pytest.raises(ModelError, match="no such folder") as caught:
        loading.resolve_model(name, quiet)
    assert repr(name) in str(caught.value)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ModelError, match="a file"):
        loading.resolve_model(str(tmp_path / "weights.gguf"), quiet)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("offline"), "could not be reached"),
        (
            RepositoryNotFoundError("404", response=mock.MagicMock()),
            "the hub has no such model",
        ),
        (OSError("disk full\nmore"), "did not give it: disk full"),
    ],
)
def test_a_failing_hub_is_explained(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(loading, "snapshot_download", fail)
    with pytest.raises(ModelError, match=words) as caught:
        loading.resolve_model("owner/name", quiet)
    assert "'owner/name'" in str(caught.value)


@pytest.mark.parametrize("save", [save_random_llama, save_random_qwen2])
def test_a_model_comes_ready_for_inference(tmp_path: Path, save: Callable[..., Path]) -> None:
    model = load(save(tmp_path / "m", padded_vocab_size=80))
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert model.dtype == torch.float32
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 80)


def test_tied_heads_are_not_missing(llama: Path) -> None:
    edit_config(llama, tie_word_embeddings=True)
    edit_weights(llama, lambda weights: weights.pop("lm_head.weight"))
    model = load(llama)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("lm_head.weight"), "1 missing weights: lm_head.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "1 unexpected weights: extra"),
        (lambda w: w.update({"model.norm.weight": torch.ones(3)}), "cannot be loaded"),
    ],
)
def test_weights_must_match_the_configuration(
    llama: Path, change: Callable[[dict[str, torch.Tensor]], Any], words: str
) -> None:
    edit_weights(llama, change)
    with pytest.raises(ModelError, match=words):
        load(llama)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "cannot be loaded"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "cannot roll back"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' changes"),
        ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "'longrope' changes"),
    ],
)
def test_what_cannot_be_exact_is_refused(llama: Path, changes: dict[str, Any], words: str) -> None:
    edit_config(llama, **changes)
    with pytest.raises(ModelError, match=words):
        load(llama)


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


def test_a_broken_configuration_is_refused(llama: Path) -> None:
    (llama / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        load(llama)


def test_only_safetensors_are_loaded(llama: Path) -> None:
    torch.save(load_file(llama / "model.safetensors"), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        load(llama)


def test_truncated_weights_are_refused(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(llama)


@pytest.mark.parametrize("device", ["cuda:99", "no-device"])
def test_an_absent_device_is_named(llama: Path, device: str) -> None:
    with pytest.raises(ModelError, match=device):
        loading.load_model(llama, torch.float32, device, quiet)


def test_a_folder_without_tokenizer_is_refused(llama: Path) -> None:
    for path in llama.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="no usable tokenizer"):
        loading.load_tokenizer(llama)


def test_eos_ids_are_gathered_from_everywhere() -> None:
    tokenizer = toy_tokenizer(10, eos_ids=(3,))
    config: Any = SimpleNamespace(eos_token_id=[7, 99])
    generation: Any = SimpleNamespace(eos_token_id=5)
    assert loading.eos_token_ids(tokenizer, config, generation) == (3, 5, 7)
    nothing: Any = SimpleNamespace(eos_token_id=None)
    assert loading.eos_token_ids(toy_tokenizer(10), nothing, None) == ()


def test_the_vocabulary_is_the_tokenizers(tmp_path: Path) -> None:
    folder = save_random_llama(tmp_path / "m", vocab_size=60, padded_vocab_size=64)
    tokenizer, config = loading.load_tokenizer(folder), load(folder).config
    assert loading.vocab_size(tokenizer) == 60
    assert loading.context_size(config) == 512
    loading.check_vocab_fits(tokenizer, config)
    tokenizer.add_tokens(["more", "and", "more_still", "tokens", "than_rows"])
    assert loading.vocab_size(tokenizer) == 65
    with pytest.raises(ModelError, match="65 tokens, the model only 64"):
        loading.check_vocab_fits(tokenizer, config)


def test_the_digest_covers_the_whole_token_table(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(10)
    digest = loading.token_table_digest(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    assert loading.token_table_digest(loading.load_tokenizer(tmp_path)) == digest
    tokenizer.add_tokens(["more"])
    assert loading.token_table_digest(tokenizer) != digest


def test_the_fingerprint_tells_what_may_change_logits(llama: Path, tmp_path: Path) -> None:
    def fingerprint(folder: Path, dtype: torch.dtype = torch.float32) -> str:
        return loading.model_fingerprint(folder, dtype, loading.load_tokenizer(folder))

    other_weights = save_noisy_copy(llama, tmp_path / "noisy", noise=1e-3)
    other_config = Path(shutil.copytree(llama, tmp_path / "config"))
    edit_config(other_config, rms_norm_eps=1e-5)
    same = Path(shutil.copytree(llama, tmp_path / "same"))
    variants = [fingerprint(folder) for folder in (llama, other_weights, other_config)]
    variants.append(fingerprint(llama, torch.bfloat16))
    assert len(set(variants)) == 4
    assert fingerprint(same) == fingerprint(llama)


def test_the_toy_tokenizer_goes_both_ways(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(64, eos_ids=(5, 7), bos=1)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, loading.load_tokenizer(tmp_path)):
        assert each("t50 t5 t7")["input_ids"] == [1, 50, 5, 7]
        assert each.decode([50, 5, 63]) == "t50 t5 t63"
        assert each.decode([50, 5, 63], skip_special_tokens=True) == "t50 t63"
        assert each.eos_token_id == 5


def test_a_bigram_gives_its_table(tmp_path: Path) -> None:
    table = np.random.default_rng(0).dirichlet(np.full(17, 0.3), size=17)
    table[0] = np.eye(17)[3]
    table[1, :4] = 0
    table[1] /= table[1].sum()
    model = load(save_bigram(tmp_path / "bigram", table))
    ids = torch.tensor([[*range(17), 3, 1, 0, 1]])
    probs = model(ids).logits.softmax(-1)[0].numpy()
    expected = table[ids[0].numpy()]
    np.testing.assert_allclose(probs, expected, rtol=0, atol=1e-6)
    assert (probs[expected == 0] == 0).all()


@pytest.mark.parametrize("save", [save_random_llama, save_random_qwen2])
def test_random_models_are_neither_flat_nor_sure(tmp_path: Path, save: Callable[..., Path]) -> None:
    model = load(save(tmp_path / "m"))
    ids = torch.randint(64, (4, 100), generator=torch.Generator().manual_seed(0))
    assert 0.15 < model(ids).logits.softmax(-1).amax(-1).mean() < 0.45


def test_a_noisy_copy_is_near(llama: Path, tmp_path: Path) -> None:
    noisy = load(save_noisy_copy(llama, tmp_path / "noisy", noise=0.03))
    ids = torch.randint(64, (4, 100), generator=torch.Generator().manual_seed(0))
    p, q = load(llama)(ids).logits.softmax(-1), noisy(ids).logits.softmax(-1)
    assert 0.4 < torch.minimum(p, q).sum(-1).mean() < 0.9
