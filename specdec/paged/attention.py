"""Attention over the paged pool, for one packed batch without padding.

A step's tokens of all sequences lie one after the other in one row of the
model's input. For each layer transformers calls `paged_attention`, which
appends the new keys and values to the pool and attends each sequence's rows to
that sequence's own context.

Sequences with few rows (verifies, plain decodes) are attended together, in
groups of similar context length; a long prefill chunk is attended by itself.

Shapes: N = packed tokens, H = query heads, G = KV heads, R = H / G,
D = head dimension; in a group, B = sequences, Q = most rows, C = padded context.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

ATTENTION_NAME = "specdec_paged"

# A sequence with more rows than this is attended by itself, where padding others
# to its length would cost more than the extra call.
_MAX_GROUPED_ROWS = 80


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """One sequence's part of a packed batch."""

    token_ids: Sequence[int]
    """The rows to compute."""
    first_position: int
    """Absolute position of the first of them; all KV before it is computed."""
    block_table: list[int]
    """Blocks that hold at least the rows' last position."""


@dataclass(slots=True)
class _Group:
    """Sequences attended together."""

    rows: torch.Tensor | slice
    """Packed rows, [B * Q] (padding repeats a row), or a slice when B = 1."""
    blocks: torch.Tensor | slice
    """Pool blocks, [B * C / block_size], or a slice when they lie in a run."""
    valid: torch.Tensor | None
    """Which of the B * Q rows are not padding; None: all."""
    mask: torch.Tensor
    """[B, 1, R * Q, C], 0 where a row may look, else -inf."""
    num_sequences: int


class PagedBatch:
    """A packed batch: what the model's forward and the attention need.

    Attributes:
        input_ids: [1, N] int64.
        position_ids: [1, N] int64 absolute positions.
        slot_mapping: [N] int64 pool slot of each token.
    """

    def __init__(self, sequences: Sequence[PackedSequence], pool: PagedKV) -> None:
        """Packs sequences, in order.

        Args:
            sequences: At least one, each with at least one row.
            pool: Where their KV lives.
        """
        self.pool = pool
        counts = np.array([len(sequence.token_ids) for sequence in sequences])  # rows of each
        firsts = np.array([sequence.first_position for sequence in sequences])
        starts = np.cumsum(counts) - counts  # packed index of each one's first row
        tables = np.full(
            (len(sequences), max(len(sequence.block_table) for sequence in sequences)),
            pool.null_block,
        )
        for table, sequence in zip(tables, sequences, strict=True):
            table[: len(sequence.block_table)] = sequence.block_table
        owners = np.repeat(np.arange(len(sequences)), counts)  # [N]
        positions = np.arange(len(owners)) + (firsts - starts)[owners]  # [N]
        blocks, offsets = np.divmod(positions, pool.block_size)
        slots = tables[owners, blocks] * pool.block_size + offsets
        token_ids = np.fromiter(
            chain.from_iterable(sequence.token_ids for sequence in sequences), np.int64
        )
        self.input_ids = torch.from_numpy(token_ids)[None].to(pool.device)
        self.position_ids = torch.from_numpy(positions)[None].to(pool.device)
        self.slot_mapping = torch.from_numpy(slots).to(pool.device)
        self.num_tokens = len(owners)
        self._groups = [
            self._group(counts[members], firsts[members], starts[members], tables[members])
            for members in _group_members(sequences, pool.block_size)
        ]

    def _group(
        self, counts: np.ndarray, firsts: np.ndarray, starts: np.ndarray, tables: np.ndarray
    ) -> _Group:
        """Lays out one group's rows, blocks and mask; its arrays have B entries."""
        pool = self.pool
        # A sequence with fewer rows than the longest repeats its last one.
        row = np.minimum(np.arange(counts.max()), counts[:, None] - 1)  # [B, Q]
        last_blocks = (firsts + counts - 1) // pool.block_size  # [B]
        num_blocks = int(last_blocks.max()) + 1
        is_held = np.arange(num_blocks) <= last_blocks[:, None]
        blocks = np.where(is_held, tables[:, :num_blocks], pool.null_block)
        context = np.arange(num_blocks * pool.block_size)  # [C]
        is_hidden = context > (firsts[:, None] + row)[:, :, None]  # [B, Q, C]
        mask = torch.zeros(is_hidden.shape, dtype=pool.dtype).masked_fill_(
            torch.from_numpy(is_hidden), -torch.inf
        )
        mask = mask[:, None].repeat(1, 1, pool.num_query_groups, 1)
        valid = None
        if counts.min() < counts.max():
            is_row = np.arange(counts.max()) < counts[:, None]
            valid = torch.from_numpy(is_row.ravel()).to(pool.device)
        return _Group(
            rows=_as_slice(starts[:, None] + row, pool.device),
            blocks=_as_slice(blocks, pool.device),
            valid=valid,
            mask=mask.to(pool.device),
            num_sequences=len(counts),
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
    ) -> torch.Tensor:
        """Appends the step's keys and values, then attends.

        Args:
            layer: Which layer.
            query: [N, H, D], positions applied.
            key: [N, G, D], positions applied.
            value: [N, G, D].
            scaling: Factor of the scores; None: 1 / sqrt(D).

        Returns:
            [N, H, D].
        """
        keys, values = self.pool.append(layer, self.slot_mapping, key, value)
        if len(self._groups) == 1 and self._groups[0].valid is None:
            group = self._groups[0]
            if isinstance(group.rows, slice):
                return _attend_group(group, query, keys, values, scaling)
        output = torch.empty_like(query)
        for group in self._groups:
            attended = _attend_group(group, query[group.rows], keys, values, scaling)
            if group.valid is not None:
                assert isinstance(group.rows, torch.Tensor)
                output[group.rows[group.valid]] = attended[group.valid]
            else:
                output[group.rows] = attended
        return output


def _group_members(sequences: Sequence[PackedSequence], block_size: int) -> list[list[int]]:
    """Groups sequences whose padding together wastes less than the calls saved."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, sequence in enumerate(sequences):
        if len(sequence.token_ids) > _MAX_GROUPED_ROWS:
            groups[-1, i].append(i)
            continue
        last = sequence.first_position + len(sequence.token_ids) - 1
        groups[(last // block_size).bit_length(), len(sequence.token_ids).bit_length()].append(i)
    return list(groups.values())


def _as_slice(indices: np.ndarray, device: torch.device) -> torch.Tensor | slice:
    """Indices that lie in a run become a slice, which copies nothing."""
    flat = indices.ravel()
    if len(flat) == 1 or bool((np.diff(flat) == 1).all()):
        return slice(int(flat[0]), int(flat[-1]) + 1)
    return torch.from_numpy(flat).to(device)


def _attend_group(
    group: _Group,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Attends one group's rows [B * Q, H, D] to its own context."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = keys.shape[2]
    b = group.num_sequences
    # Query heads that share a KV head become rows of it, so that keys and values
    # are never repeated: [B, G, R * Q, D].
    grouped = (
        query.view(b, -1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(b, num_kv_heads, -1, head_dim)
    )
    context_keys = keys[group.blocks].view(b, -1, num_kv_heads, head_dim).transpose(1, 2)
    context_values = values[group.blocks].view(b, -1, num_kv_heads, head_dim).transpose(1, 2)
    attended = F.scaled_dot_product_attention(
        grouped, context_keys, context_values, attn_mask=group.mask, scale=scaling
    )
    return (
        attended.view(b, num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
        .permute(0, 3, 1, 2, 4)
        .reshape(-1, num_heads, head_dim)
    )


class PagedKV:
    """The KV memory of all layers.

    One key and one value tensor per layer, [num_blocks + 1, block_size, G, D];
    the last block is never written and pads block tables.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates the memory, zeroed: what padding reads must be finite."""
        self.block_size = block_size
        self.num_query_groups = num_heads // num_kv_heads
        self.null_block = num_blocks
        self.dtype = dtype
        self.device = device
        shape = (num_blocks + 1, block_size, num_kv_heads, head_dim)
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def append(
        self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values to their slots.

        Args:
            layer: Which layer.
            slot_mapping: [N] int64 slots.
            key: [N, G, D].
            value: [N, G, D].

        Returns:
            The layer's keys and values, [num_blocks + 1, block_size, G, D].
        """
        keys, values = self._keys[layer], self._values[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, slot_mapping, key)
        values.view(-1, *values.shape[2:]).index_copy_(0, slot_mapping, value)
        return keys, values

    def clear(self, block_ids: list[int]) -> None:
        """Zeroes blocks that may hold a NaN, which masked reads would spread."""
        for tensor in (*self._keys, *self._values):
            tensor[block_ids] = 0.0


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_batch: PagedBatch,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer, with [1, heads, N, D] tensors."""
    del attention_mask  # the batch has its own
    attended = paged_batch.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
    )
    return attended[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
