"""Checks at start that a model over the paged pool computes what it should.

Transformers' attention interface passes what a family needs as arguments. A
family that needs one we do not know would be served wrongly, without a sign. So
the logits of a short text are computed twice, by the stock model and over the
pool, in two chunks as a prefill would be; they differ by rounding alone.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from specdec.models.loading import ModelError
from specdec.paged.attention import PackedSequence
from specdec.paged.model import PagedModel

_NUM_TOKENS = 48
# Of the median row, relative to the spread of its logits. Wrong attention gives errors
# near 1, rounding 1e-6 and 2e-2; single rows of a mixture of experts may go astray.
_MAX_ERRORS = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def _text(vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (_NUM_TOKENS,), generator=generator).tolist()


@torch.inference_mode()
def stock_logits(model: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    """Computes the text's logits with the model as transformers made it.

    Args:
        model: Before it is put over a pool.
        vocab_size: V, the ids that can be emitted.

    Returns:
        [48, V] float32.
    """
    input_ids = torch.tensor([_text(vocab_size)], device=model.device)
    logits: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits[0]
    return logits[:, :vocab_size].float()


def check_logits(model: PagedModel, expected: torch.Tensor, name: str) -> None:
    """Compares with the stock model's logits.

    Args:
        model: The model over its pool, of which no block is held.
        expected: [48, V] what `stock_logits` gave.
        name: The model's class, for the message.

    Raises:
        ModelError: If they differ by more than rounding.
    """
    pool = model.block_pool
    tokens = _text(model.vocab_size)[: pool.num_blocks * pool.block_size]
    blocks = pool.allocate(pool.num_blocks_for(len(tokens)))
    first_chunk = -(-len(tokens) * 3 // 5)
    rows = []
    for start, end in ((0, first_chunk), (first_chunk, len(tokens))):
        if start < end:
            packed = PackedSequence(tokens[start:end], start, blocks)
            rows.append(model.forward([packed], [end - start]))
    model.kv.clear(pool.free(reversed(blocks)))
    expected = expected[: len(tokens)]
    if not expected.isfinite().all(dim=1).any():
        return  # a broken model: its requests end with an error each
    spread = (expected - expected.mean(dim=1, keepdim=True)).norm(dim=1)
    errors = (torch.cat(rows) - expected).norm(dim=1) / spread
    error = float(errors.nanmedian())  # some token may well have no finite logits
    if not error <= _MAX_ERRORS[model.dtype]:
        raise ModelError(
            f"{name} cannot be served exactly: with an attention of our own its logits are"
            f" off by {error:.2g} of their spread"
        )
