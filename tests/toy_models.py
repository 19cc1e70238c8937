"""Tiny checkpoints, made from a seed, with a tokenizer whose token i reads "t{i}"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
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


_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_PLAIN_SHAPE = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
_WINDOW = 12

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama_tied": lambda: LlamaConfig(**{**_SHAPE, "tie_word_embeddings": True}),
    "llama_rope_llama3": lambda: LlamaConfig(
        **_SHAPE,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama_rope_yarn": lambda: LlamaConfig(
        **_SHAPE,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=16),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=_WINDOW, head_dim=16),
    "gemma2": lambda: Gemma2Config(
        **{**_SHAPE, "tie_word_embeddings": True},
        head_dim=16,
        query_pre_attn_scalar=12,
        sliding_window=_WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=8.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**_SHAPE, "tie_word_embeddings": True, "num_hidden_layers": 4},
        head_dim=16,
        query_pre_attn_scalar=12,
        sliding_window=_WINDOW,
        sliding_window_pattern=2,
    ),
    "phi3": lambda: Phi3Config(**_SHAPE, sliding_window=_WINDOW),
    "gpt2": lambda: GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=512,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_PLAIN_SHAPE),
    "opt": lambda: OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        word_embed_proj_dim=16,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    ),
    "olmo2": lambda: Olmo2Config(**_SHAPE),
    "gpt_oss": lambda: GptOssConfig(
        **_SHAPE,
        head_dim=16,
        sliding_window=_WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}
"""Configurations of small models of each family; windows are shorter than the tests' texts."""


def save_random_family(folder: Path, family: str, seed: int = 0) -> Path:
    """Saves a random model of a family in float32, with a tokenizer of 64 tokens.

    Args:
        folder: Where to; made if missing.
        family: A key of FAMILIES.
        seed: Another seed gives an unrelated model.

    Returns:
        The folder.
    """
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    _randomise(model, seed, head_scale=2.0)
    return _save(model, toy_tokenizer(64), folder)


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
            if weight.dim() == 1 and name.endswith("weight"):  # a norm's
                continue
            is_projection = weight.dim() >= 2 and "embed" not in name
            scale = weight.shape[-1] ** -0.5 if is_projection else 1.0
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
