"""Attention over the paged pool, for one packed batch without padding.

A step's tokens of all sequences lie one after the other in one row of the
model's input. For each layer transformers calls `paged_attention`, which
appends the new keys and values to the pool and attends each sequence's rows to
that sequence's own context.

Sequences with few rows (verifies, plain decodes) are attended together, in
groups of similar context length; a long prefill chunk is attended by itself.

Sliding windows, soft-capped scores and attention sinks are what transformers'
own attention functions make of the same arguments.

Shapes: N = packed tokens, H = query heads, G = KV heads, R = H / G,
D = head dimension (E of values, where it differs); in a group, B = sequences,
Q = most rows, C = padded context.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How one layer attends."""

    scaling: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    sliding_window: int | None = None
    """Tokens a row sees, itself included; None: all."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap); None: they stay."""
    sinks: torch.Tensor | None = None
    """[H] scores of a key that every row sees and that has no value; None: none."""


@dataclass(slots=True)
class _Group:
    """Sequences attended together."""

    rows: torch.Tensor | slice
    """Packed rows, [B * Q] (padding repeats a row), or a slice when B = 1."""
    blocks: torch.Tensor | slice
    """Pool blocks, [B * C / block_size], or a slice when they lie in a run."""
    valid: torch.Tensor | None
    """Which of the B * Q rows are not padding; None: all."""
    distances: torch.Tensor
    """[B, Q, C] tokens from a context position up to the row's; negative: ahead of it."""
    num_sequences: int
    masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(
        self, sliding_window: int | None, num_repeats: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """[B, 1, R * Q, C], 0 where a row may look, else -inf; made once per step."""
        mask = self.masks.get((sliding_window, num_repeats))
        if mask is None:
            is_hidden = self.distances < 0
            if sliding_window is not None:
                is_hidden |= self.distances >= sliding_window
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
            mask = mask.masked_fill_(is_hidden, -torch.inf)[:, None].repeat(1, 1, num_repeats, 1)
            self.masks[sliding_window, num_repeats] = mask
        return mask


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
        distances = (firsts[:, None] + row)[:, :, None] - context  # [B, Q, C]
        valid = None
        if counts.min() < counts.max():
            is_row = np.arange(counts.max()) < counts[:, None]
            valid = torch.from_numpy(is_row.ravel()).to(pool.device)
        return _Group(
            rows=_as_slice(starts[:, None] + row, pool.device),
            blocks=_as_slice(blocks, pool.device),
            valid=valid,
            distances=torch.from_numpy(distances).to(pool.device),
            num_sequences=len(counts),
        )

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Appends the step's keys and values, then attends.

        Args:
            layer: Which layer.
            query: [N, H, D], positions applied.
            key: [N, G, D], positions applied.
            value: [N, G, E].
            options: How to attend.

        Returns:
            [N, H, E].
        """
        keys, values = self.pool.append(layer, self.slot_mapping, key, value)
        if len(self._groups) == 1 and self._groups[0].valid is None:
            group = self._groups[0]
            if isinstance(group.rows, slice):
                return _attend_group(group, query, keys, values, options)
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        for group in self._groups:
            attended = _attend_group(group, query[group.rows], keys, values, options)
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
    options: AttentionOptions,
) -> torch.Tensor:
    """Attends one group's rows [B * Q, H, D] to its own context."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, value_dim = values.shape[2:]
    num_repeats = num_heads // num_kv_heads
    b = group.num_sequences
    # Query heads that share a KV head become rows of it, so that keys and values
    # are never repeated: [B, G, R * Q, D].
    grouped = (
        query.view(b, -1, num_kv_heads, num_repeats, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(b, num_kv_heads, -1, head_dim)
    )
    context_keys = keys[group.blocks].view(b, -1, num_kv_heads, head_dim).transpose(1, 2)
    context_values = values[group.blocks].view(b, -1, num_kv_heads, value_dim).transpose(1, 2)
    mask = group.mask(options.sliding_window, num_repeats, query.dtype)
    if options.softcap is None and options.sinks is None:
        attended = F.scaled_dot_product_attention(
            grouped, context_keys, context_values, attn_mask=mask, scale=options.scaling
        )
    else:
        attended = _attend_explicitly(grouped, context_keys, context_values, mask, options)
    return (
        attended.view(b, num_kv_heads, num_repeats, -1, value_dim)
        .permute(0, 3, 1, 2, 4)
        .reshape(-1, num_heads, value_dim)
    )


def _attend_explicitly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """What torch's fused attention has no argument for; softmax in float32.

    Args:
        query: [B, G, R * Q, D].
        keys: [B, G, C, D].
        values: [B, G, C, E].
        mask: [B, 1, R * Q, C].
        options: With a soft cap or sinks.

    Returns:
        [B, G, R * Q, E].
    """
    scaling = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    scores = query @ keys.transpose(2, 3) * scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = (scores + mask).float()
    if options.sinks is not None:
        num_rows = scores.shape[2] * scores.shape[1] // len(options.sinks)
        # Rows are query heads of a KV head, one after the other: [1, G, R * Q, 1].
        sinks = options.sinks.float().view(scores.shape[1], -1).repeat_interleave(num_rows, dim=1)
        sinks = sinks[None, :, :, None].expand(scores.shape[0], -1, -1, -1)
        scores = torch.cat((scores, sinks), dim=-1)
        probs = scores.softmax(dim=-1)[..., :-1]
    else:
        probs = scores.softmax(dim=-1)
    return probs.to(query.dtype) @ values


class PagedKV:
    """The KV memory of all layers.

    One key and one value tensor per layer, [num_blocks + 1, block_size, G, D or E];
    the last block is never written and pads block tables.
    """

    def __init__(
        self,
        *,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates the memory, zeroed: what padding reads must be finite."""
        self.block_size = block_size
        self.null_block = num_blocks
        self.device = device

        def allocate(num_kv_heads: int, dim: int) -> torch.Tensor:
            shape = (num_blocks + 1, block_size, num_kv_heads, dim)
            return torch.zeros(shape, dtype=dtype, device=device)

        self._keys = [allocate(layer.num_kv_heads, layer.key_dim) for layer in layers]
        self._values = [allocate(layer.num_kv_heads, layer.value_dim) for layer in layers]

    def append(
        self, layer: int, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values to their slots.

        Args:
            layer: Which layer.
            slot_mapping: [N] int64 slots.
            key: [N, G, D].
            value: [N, G, E].

        Returns:
            The layer's keys, [num_blocks + 1, block_size, G, D], and values, [..., G, E].
        """
        keys, values = self._keys[layer], self._values[layer]
        keys.view(-1, *keys.shape[2:]).index_copy_(0, slot_mapping, key)
        values.view(-1, *values.shape[2:]).index_copy_(0, slot_mapping, value)
        return keys, values

    def copy_block(self, source: int, target: int) -> None:
        """Copies a block's keys and values to another block."""
        for tensor in (*self._keys, *self._values):
            tensor[target] = tensor[source]

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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer, with [1, heads, N, dim] tensors."""
    del attention_mask  # the batch has its own
    attended = paged_batch.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionOptions(
            scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux
        ),
    )
    return attended[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
