"""A causal LM over the paged pool: one packed forward for a whole step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import psutil
import torch
from transformers import PreTrainedModel

from specdec.models.loading import ModelError
from specdec.paged.attention import (
    ATTENTION_NAME,
    AttentionOptions,
    LayerShape,
    PackedSequence,
    PagedBatch,
    PagedKV,
)
from specdec.paged.block_pool import BlockPool
from specdec.paged.packed_linear import pack_linears

# Memory a pool takes when its size is not set. The rest of a CPU machine is other
# processes'; a GPU is ours.
_CPU_SHARE, _CPU_MOST_BYTES = 0.25, 2 * 1024**3
_CUDA_SHARE = 0.85


class PagedModel:
    """A transformers model whose attention reads and writes a paged pool.

    Attributes:
        block_pool: Which blocks are free.
        kv: The memory itself.
        vocab_size: V, the ids that can be emitted; the head may be wider.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        max_tokens: int,
        prefix_cache: bool = True,
    ) -> None:
        """Takes over a loaded model.

        Args:
            model: On its device, in its dtype, in eval mode.
            vocab_size: Number of ids of the tokenizer.
            num_blocks: Blocks in the pool; 0 sizes it from free memory.
            block_size: Tokens per block.
            max_tokens: Tokens beyond which a sized pool need not go.
            prefix_cache: Whether KV is kept for other sequences with the same prefix.

        Raises:
            ModelError: If its layers do not all attend through the interface.
        """
        self._model = model
        self._model.set_attn_implementation(ATTENTION_NAME)
        self.vocab_size = vocab_size
        self.device = model.device
        self.dtype = model.dtype
        layers = _find_layers(model)
        pack_linears(model)
        if not num_blocks:
            token_bytes = model.dtype.itemsize * sum(
                layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in layers
            )
            block_bytes = block_size * token_bytes
            num_blocks = max(
                1, min(_free_bytes(self.device) // block_bytes, max_tokens // block_size)
            )
        self.kv = PagedKV(
            layers=layers,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=self.device,
        )
        self.block_pool = BlockPool(
            num_blocks, block_size, copy_block=self.kv.copy_block, keeps_prefixes=prefix_cache
        )

    @torch.inference_mode()
    def forward(
        self, sequences: Sequence[PackedSequence], num_logits: Sequence[int]
    ) -> torch.Tensor:
        """Computes every row's KV, and logits where they are wanted.

        Args:
            sequences: [n] at least one, each with at least one row.
            num_logits: [n] how many of each sequence's last rows need logits.

        Returns:
            [sum(num_logits), V] float32 raw logits, sequence after sequence.
        """
        batch = PagedBatch(sequences, self.kv)
        ends = np.cumsum([len(sequence.token_ids) for sequence in sequences])
        rows = np.concatenate(
            [np.arange(end - count, end) for end, count in zip(ends, num_logits, strict=True)]
        )
        # Without a row the head is still run, on the first row: transformers has
        # no way to leave it out in every family, and one row costs little.
        wanted = torch.from_numpy(rows if len(rows) else np.zeros(1, dtype=np.int64))
        logits: torch.Tensor = self._model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=wanted.to(self.device),
            paged_batch=batch,
        ).logits[0]
        return logits[: len(rows), : self.vocab_size].float()


class _LayerProbe:
    """Takes a batch's place in one forward, to see what each layer would keep."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        del options
        self.layers[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        return query.new_zeros(*query.shape[:2], value.shape[2])


@torch.inference_mode()
def _find_layers(model: PreTrainedModel) -> list[LayerShape]:
    """Runs one token through a model to see its attention layers."""
    probe = _LayerProbe()
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    name, num_layers = type(model).__name__, model.config.get_text_config().num_hidden_layers
    try:
        model(input_ids=zero, position_ids=zero, use_cache=False, paged_batch=probe)
    except Exception as error:
        raise ModelError(f"{name} cannot run with an attention of our own: {error}") from error
    if sorted(probe.layers) != list(range(num_layers)):
        raise ModelError(
            f"{name}: {len(probe.layers)} of {num_layers} layers attend through transformers'"
            " attention interface; the others may keep state that cannot roll back"
        )
    return [probe.layers[layer] for layer in range(num_layers)]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _CUDA_SHARE)
    return min(_CPU_MOST_BYTES, int(psutil.virtual_memory().available * _CPU_SHARE))
