"""What is read off logits, and what changes them before they become probabilities.

Bias, masks and penalties are the first part of the one pipeline (`specdec.sampling`), in
this order:

1. `logit_bias` is added.
2. Masks set logits to -inf: all ids but the allowed ones; the ids that would end
   the generation, while it has fewer than `min_tokens` tokens; the last token of a
   bad word whose other tokens end the output so far.
3. Penalties. Repetition (arXiv 1909.05858, section 4.1): the logits of ids in prompt
   or output are divided by it if positive, else multiplied. Frequency and presence: a
   logit falls by `frequency_penalty` times the id's count in the output, and by
   `presence_penalty` if that is not 0.

A row's output so far is the committed tokens after the prompt, and the drafts before
the row: each token counts once, and a draft only in rows that stand on it.

Shapes: n = rows, V = vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Prefix:
    """All tokens before the one a row decides."""

    token_ids: Sequence[int]
    """Committed tokens, the prompt first."""
    num_prompt_tokens: int
    drafts: Sequence[int] = ()
    """Drafted tokens after them."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens + len(self.drafts)

    def last_output(self, num_tokens: int) -> tuple[int, ...]:
        """The last tokens after the prompt; fewer when there are fewer."""
        if num_tokens <= len(self.drafts):
            return tuple(self.drafts[len(self.drafts) - num_tokens :])
        start = max(self.num_prompt_tokens, len(self.token_ids) + len(self.drafts) - num_tokens)
        return (*self.token_ids[start:], *self.drafts)


def adjust_logits(
    logits: torch.Tensor, params: Sequence[SamplingParams], prefixes: Sequence[Prefix | None] | None
) -> torch.Tensor:
    """Applies bias, masks and penalties.

    Args:
        logits: [n, V] raw logits, float32 or float64, finite.
        params: [n] parameters of each row.
        prefixes: [n] what comes before each row; None where `shapes_logits` is false.

    Returns:
        [n, V] logits, -inf where masked; the same tensor when no row asks for any of it.
    """
    rows = [i for i, row in enumerate(params) if row.shapes_logits]
    if not rows:
        return logits
    assert prefixes is not None
    shaped = logits[rows]
    chosen = [params[i] for i in rows]
    before = [_known(prefixes[i]) for i in rows]
    _add_bias(shaped, chosen)
    _mask(shaped, chosen, before)
    shaped = _penalise(shaped, chosen, before)
    if len(rows) == len(logits):
        return shaped
    return logits.index_copy(0, torch.tensor(rows, device=logits.device), shaped)


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Log-probabilities of emitted tokens, before anything shapes the distribution.

    Args:
        logits: [n, V] raw logits, float32.
        token_ids: [n] the emitted tokens.
        num_top: Alternatives wanted, 0 or more.

    Returns:
        [n] log-probabilities. Equal alternatives rank by id, lowest first, as far as
        they are among those found.
    """
    logprobs = logits.log_softmax(dim=1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=1)
    return [
        TokenLogprobs(logprob, tuple(sorted(zip(top, row, strict=True), key=_best_first)))
        for logprob, top, row in zip(own, ids.tolist(), values.tolist(), strict=True)
    ]


def _best_first(entry: tuple[int, float]) -> tuple[float, int]:
    token_id, logprob = entry
    return -logprob, token_id


def _known(prefix: Prefix | None) -> Prefix:
    assert prefix is not None
    return prefix


def _add_bias(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Adds logit_bias in place."""
    entries = [
        (i, token_id, bias) for i, row in enumerate(params) for token_id, bias in row.logit_bias
    ]
    if entries:
        rows, token_ids, biases = zip(*entries, strict=True)
        values = torch.tensor(biases, dtype=logits.dtype).to(logits.device)
        logits.index_put_(_index(rows, token_ids, logits.device), values, accumulate=True)


def _mask(
    logits: torch.Tensor, params: Sequence[SamplingParams], prefixes: Sequence[Prefix]
) -> None:
    """Sets what a row may not emit to -inf, in place."""
    for i, row in enumerate(params):
        if row.allowed_token_ids:
            allowed = torch.tensor(row.allowed_token_ids, device=logits.device)
            kept = logits[i, allowed]
            logits[i] = -torch.inf
            logits[i, allowed] = kept
    entries: list[tuple[int, int]] = []
    for i, (row, prefix) in enumerate(zip(params, prefixes, strict=True)):
        if prefix.num_output_tokens < row.min_tokens:
            entries += [(i, token_id) for token_id in row.end_token_ids]
        for *first, last in row.bad_word_token_ids:
            if prefix.last_output(len(first)) == tuple(first):
                entries.append((i, last))
    if entries:
        rows, token_ids = zip(*entries, strict=True)
        logits[_index(rows, token_ids, logits.device)] = -torch.inf


def _penalise(
    logits: torch.Tensor, params: Sequence[SamplingParams], prefixes: Sequence[Prefix]
) -> torch.Tensor:
    """Applies the three penalties; rows without any keep their bits."""
    rows = [i for i, row in enumerate(params) if row.has_penalty]
    if not rows:
        return logits
    device, dtype = logits.device, logits.dtype
    # Rows of a chain have their committed tokens in common: counted once.
    bases = {id(prefixes[i].token_ids): prefixes[i] for i in rows}
    counted = {key: _count(prefix, logits.shape[1]) for key, prefix in bases.items()}
    in_prompt = torch.stack([counted[id(prefixes[i].token_ids)][0] for i in rows]).to(device)
    counts = torch.stack([counted[id(prefixes[i].token_ids)][1] for i in rows]).to(dtype)
    for row, i in enumerate(rows):
        for token_id in prefixes[i].drafts:
            counts[row, token_id] += 1
    counts = counts.to(device)

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[:, None].to(device)  # [m, 1]

    penalised = logits[rows]
    repetition = column([params[i].repetition_penalty for i in rows])
    scaled = torch.where(penalised > 0, penalised / repetition, penalised * repetition)
    penalised = torch.where(in_prompt | (counts > 0), scaled, penalised)
    penalised = penalised - column([params[i].frequency_penalty for i in rows]) * counts
    penalised = penalised - column([params[i].presence_penalty for i in rows]) * (counts > 0)
    return logits.index_copy(0, torch.tensor(rows, device=device), penalised)


def _count(prefix: Prefix, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts committed tokens.

    Returns:
        [V] bool, which ids are in the prompt; [V] int64, how often each is in the output.
    """
    tokens = np.asarray(prefix.token_ids, dtype=np.int64)
    in_prompt = np.zeros(vocab_size, dtype=bool)
    in_prompt[tokens[: prefix.num_prompt_tokens]] = True
    counts = np.bincount(tokens[prefix.num_prompt_tokens :], minlength=vocab_size)
    return torch.from_numpy(in_prompt), torch.from_numpy(counts)


def _index(
    rows: Sequence[int], token_ids: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(rows, device=device), torch.tensor(token_ids, device=device)
