"""Tiny checkpoints, made from a seed, with a tokenizer whose token i reads "t{i}"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

IMPOSSIBLE_LOGIT = -1e9
"""exp of it is exactly 0 in float32, at any temperature up to a million."""


def toy_tokenizer(
    vocab_size: int, eos_ids: Sequence[int] = (), bos: int | None = None
) -> PreTrainedTokenizerFast:
    """Makes a tokenizer where "t1 t2" is [1, 2] and back.

    Args:
        vocab_size: Tokens t0 to t{vocab_size - 1}; an unknown word is t0.
        eos_ids: Special tokens; the first one is the tokenizer's EOS.
        bos: Special token put before every text; unset: none.

    Returns:
        The tokenizer.
    """
    backend = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Without a decoder, tokens are joined with spaces.
    named = {}
    if bos is not None:
        named["bos_token"] = _special(bos)
        backend.post_processor = processors.TemplateProcessing(
            single=f"t{bos} $A", special_tokens=[(f"t{bos}", bos)]
        )
    if eos_ids:
        named["eos_token"] = _special(eos_ids[0])
    backend.add_special_tokens([_special(i) for i in (*eos_ids, *([] if bos is None else [bos]))])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **named
    )


def save_random_llama(
    folder: Path,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    seed: int = 0,
    padded_vocab_size: int | None = None,
    eos_token_id: int | list[int] | None = None,
    max_position_embeddings: int = 512,
    head_scale: float = 2.0,
) -> Path:
    """Saves a random Llama in float32, with its tokenizer.

    Args:
        folder: Where to; made if missing.
        vocab_size: Tokens of the tokenizer.
        hidden_size: Width of the model.
        num_layers: Layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        seed: Another seed gives an unrelated model.
        padded_vocab_size: Rows of the embeddings; unset: vocab_size.
        eos_token_id: EOS ids of model and tokenizer; unset: none.
        max_position_embeddings: Context size, in tokens.
        head_scale: Standard deviation of the logits; 2 puts about 0.3 on the top of 64 tokens.

    Returns:
        The folder.
    """
    config = LlamaConfig(
        **_sizes(hidden_size, num_layers, num_heads, num_kv_heads, eos_token_id),
        vocab_size=padded_vocab_size or vocab_size,
        max_position_embeddings=max_position_embeddings,
    )
    model = LlamaForCausalLM(config)
    _randomise(model, seed, head_scale)
    return _save(model, toy_tokenizer(vocab_size, _as_tuple(eos_token_id)), folder)


def save_random_qwen2(
    folder: Path,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    seed: int = 0,
    padded_vocab_size: int | None = None,
    eos_token_id: int | list[int] | None = None,
    max_position_embeddings: int = 512,
    head_scale: float = 2.0,
) -> Path:
    """Saves a random Qwen2, biases on q, k and v included; as `save_random_llama`."""
    config = Qwen2Config(
        **_sizes(hidden_size, num_layers, num_heads, num_kv_heads, eos_token_id),
        vocab_size=padded_vocab_size or vocab_size,
        max_position_embeddings=max_position_embeddings,
    )
    model = Qwen2ForCausalLM(config)
    _randomise(model, seed, head_scale)
    return _save(model, toy_tokenizer(vocab_size, _as_tuple(eos_token_id)), folder)


def save_bigram(
    folder: Path,
    table: np.ndarray,
    eos_token_id: int | list[int] | None = None,
    max_position_embeddings: int = 512,
) -> Path:
    """Saves a Llama that gives exactly the probabilities of a table.

    The hidden state is the one-hot of the last token: its embedding, to which
    zeroed projections add nothing. The final norm scales it by sqrt(V), so the
    head is log(table) / sqrt(V).

    Args:
        folder: Where to; made if missing.
        table: [V, V], row-stochastic: row i holds the probabilities after token i.
        eos_token_id: EOS ids of model and tokenizer; unset: none.
        max_position_embeddings: Context size, in tokens.

    Returns:
        The folder.
    """
    vocab_size = len(table)
    assert table.shape == (vocab_size, vocab_size)
    assert np.allclose(table.sum(axis=1), 1.0)
    config = LlamaConfig(
        **_sizes(vocab_size, 1, 1, 1, eos_token_id),
        vocab_size=vocab_size,
        head_dim=8,
        rms_norm_eps=1e-12,
        max_position_embeddings=max_position_embeddings,
    )
    model = LlamaForCausalLM(config)
    with np.errstate(divide="ignore"):
        logits = np.maximum(np.log(table.astype(np.float64)), IMPOSSIBLE_LOGIT)
    layer = model.model.layers[0]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size))
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(torch.from_numpy(logits.T / np.sqrt(vocab_size)))
    return _save(model, toy_tokenizer(vocab_size, _as_tuple(eos_token_id)), folder)


def save_noisy_copy(source: Path, folder: Path, noise: float, seed: int = 0) -> Path:
    """Saves a model near another one: a draft with partial acceptance.

    Not for a bigram whose table has zeros: give the draft a table of its own.

    Args:
        source: A saved model with its tokenizer.
        folder: Where to; made if missing.
        noise: Standard deviation of what is added to every weight.
        seed: Makes the noise.

    Returns:
        The folder.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=noise)
    return _save(model, AutoTokenizer.from_pretrained(source), folder)


def _sizes(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    eos_token_id: int | list[int] | None,
) -> dict[str, object]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "tie_word_embeddings": False,
    }


def _randomise(model: PreTrainedModel, seed: int, head_scale: float) -> None:
    """Makes every part matter: unit variance through each projection, biases included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                continue
            is_projection = weight.dim() == 2 and "embed" not in name
            scale = weight.shape[1] ** -0.5 if is_projection else 1.0
            if name == "lm_head.weight":
                scale *= head_scale
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _special(token_id: int) -> AddedToken:
    # single_word: "t5" must not match inside "t50".
    return AddedToken(f"t{token_id}", single_word=True, special=True, normalized=False)


def _as_tuple(eos_token_id: int | list[int] | None) -> tuple[int, ...]:
    if eos_token_id is None:
        return ()
    return (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
