"""From a model's name to a model over the paged pool."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.models.loading import (
    Report,
    check_vocab_fits,
    context_size,
    eos_token_ids,
    load_model,
    load_tokenizer,
    resolve_model,
    to_stderr,
    token_table_digest,
    vocab_size,
)
from specdec.paged.model import PagedModel
from specdec.paged.self_check import check_logits, stock_logits


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run, and the facts others ask about."""

    model: PagedModel
    folder: Path
    context_size: int
    """Most tokens of one sequence: the model's positions or the pool's room."""
    eos_token_ids: tuple[int, ...]
    token_table_digest: str


def set_num_threads(num_threads: int) -> None:
    """Sets the compute threads of this process.

    Args:
        num_threads: How many; 0 for the cores this process may use.
    """
    torch.set_num_threads(num_threads or len(os.sched_getaffinity(0)))


def load_paged_model(
    name: str,
    *,
    dtype: str,
    device: str,
    num_blocks: int,
    block_size: int,
    max_sequences: int,
    prefix_cache: bool = True,
    report: Report = to_stderr,
) -> LoadedModel:
    """Finds, checks and loads a model, and allocates its pool.

    Args:
        name: "default", a local folder, or a hub id.
        dtype: Name of the compute type: float32 or bfloat16.
        device: Torch device.
        num_blocks: Blocks in the pool; 0 sizes it from free memory.
        block_size: Tokens per block.
        max_sequences: A pool sized from memory holds this many full contexts at most.
        prefix_cache: Whether KV is kept for other sequences with the same prefix.
        report: Is told what goes on.

    Returns:
        The model and its facts.

    Raises:
        ModelError: If the model cannot be found, loaded or served exactly.
    """
    folder = resolve_model(name, report)
    tokenizer = load_tokenizer(folder)
    loaded = load_model(folder, getattr(torch, dtype), device, report)
    check_vocab_fits(tokenizer, loaded.config)
    positions, size = context_size(loaded.config), vocab_size(tokenizer)
    expected = stock_logits(loaded, size)
    model = PagedModel(
        loaded,
        vocab_size=size,
        num_blocks=num_blocks,
        block_size=block_size,
        max_tokens=positions * max_sequences,
        prefix_cache=prefix_cache,
    )
    check_logits(model, expected, type(loaded).__name__)
    pool = model.block_pool
    return LoadedModel(
        model=model,
        folder=folder,
        context_size=min(positions, pool.num_blocks * pool.block_size),
        eos_token_ids=eos_token_ids(tokenizer, loaded.config, loaded.generation_config),
        token_table_digest=token_table_digest(tokenizer),
    )
