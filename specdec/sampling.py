"""From logits to probabilities to a token: one pure pipeline for every service.

Draft, verify, bonus and plain decode all go through `probs_from_logits`, with
the row's own parameters and its own prefix, and nothing applies temperature,
top-k, top-p or min-p to a probability again. The order is transformers': bias,
masks and penalties (`specdec.logits`), subtract the row maximum and divide by
the temperature, top-k, top-p, min-p.

Tie rules. Greedy: the lowest id of the largest logit. Top-k: tokens tied with
the k-th are kept. Top-p: a token is kept iff the mass ranked before it is below
top_p; equal probabilities rank by id, lowest first. Min-p: a token is kept iff its
probability is at least min_p times the largest one.

Shapes: n = rows, V = vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec.logits import Prefix, adjust_logits
from specdec.randomness import exponential_noise, exponential_noise_at
from specdec.types import DraftDistribution, SamplingParams

# Top-p looks at this many of the most likely tokens first; only rows whose mass
# is not reached by then are sorted in full.
_TOP_P_CANDIDATES = 1024


def probs_from_logits(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    prefixes: Sequence[Prefix | None] | None = None,
) -> torch.Tensor:
    """Turns logits into the distribution the row's token is drawn from.

    Args:
        logits: [n, V] raw logits, float32 or float64, finite.
        params: [n] parameters of each row.
        prefixes: [n] what comes before each row; needed where `shapes_logits` is true.

    Returns:
        [n, V] probabilities in the dtype of `logits`, each row summing to 1. A
        greedy row has all its mass on the argmax.
    """
    logits = adjust_logits(logits, params, prefixes)
    # In the dtype of the logits, so that tests can enumerate in float64.
    temperature = torch.tensor([[row.temperature] for row in params], dtype=logits.dtype).to(
        logits.device
    )
    is_greedy = temperature == 0.0
    scaled = logits - logits.amax(dim=1, keepdim=True)
    scaled = scaled / torch.where(is_greedy, 1.0, temperature)
    top_k = [min(row.top_k, logits.shape[1]) for row in params]
    if any(top_k):
        scaled = _mask_below_top_k(scaled, top_k)
    probs = torch.softmax(scaled, dim=1)
    if any(row.top_p < 1.0 for row in params):
        probs = _keep_top_p(probs, [row.top_p for row in params])
    if any(row.min_p > 0.0 for row in params):
        probs = _keep_min_p(probs, [row.min_p for row in params])
    if any(row.is_greedy for row in params):
        one_hot = torch.zeros_like(probs).scatter_(1, logits.argmax(dim=1, keepdim=True), 1.0)
        probs = torch.where(is_greedy, one_hot, probs)
    return probs


def _mask_below_top_k(scaled: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """Sets logits below each row's k-th largest to -inf; k = 0 keeps the row."""
    k = torch.tensor(top_k, device=scaled.device)[:, None]  # [n, 1]
    largest = scaled.topk(max(top_k), dim=1).values  # [n, max k], descending
    threshold = largest.gather(1, (k - 1).clamp(min=0))
    return scaled.masked_fill((scaled < threshold) & (k > 0), -torch.inf)


def _keep_top_p(probs: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """Keeps the smallest set of likeliest tokens holding top_p; renormalises."""
    limit = torch.tensor(top_p, dtype=probs.dtype).to(probs.device)[:, None]  # [n, 1]
    num_candidates = min(_TOP_P_CANDIDATES, probs.shape[1])
    ranked = probs.topk(num_candidates, dim=1).values  # [n, num_candidates], descending
    if num_candidates < probs.shape[1] and bool((ranked.sum(1) < limit[:, 0]).any()):
        ranked = probs.sort(dim=1, descending=True).values
    mass_before = ranked.cumsum(dim=1) - ranked
    # The last kept rank; rank 0 has no mass before it and is always kept.
    last = ((mass_before < limit).sum(dim=1, keepdim=True) - 1).clamp(min=0)
    cutoff = ranked.gather(1, last)  # [n, 1] probability of the last kept token
    num_kept_ties = ((ranked >= cutoff) & (mass_before < limit)).sum(1, keepdim=True) - (
        ranked > cutoff
    ).sum(1, keepdim=True)
    is_tie = probs == cutoff
    keep = (probs > cutoff) | (is_tie & (is_tie.cumsum(dim=1) <= num_kept_ties))
    kept = torch.where(keep, probs, 0.0)
    # A row without top-p is left as it is, so that its bits do not depend on its neighbours.
    return torch.where(limit >= 1.0, probs, kept / kept.sum(dim=1, keepdim=True))


def _keep_min_p(probs: torch.Tensor, min_p: list[float]) -> torch.Tensor:
    """Keeps tokens at least min_p times as likely as the likeliest; renormalises."""
    share = torch.tensor(min_p, dtype=probs.dtype).to(probs.device)[:, None]  # [n, 1]
    kept = torch.where(probs >= share * probs.amax(dim=1, keepdim=True), probs, 0.0)
    return torch.where(share <= 0.0, probs, kept / kept.sum(dim=1, keepdim=True))


def draw_tokens(
    weights: torch.Tensor, keys: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """Draws one token per row, with the row's noise indexed by token id.

    Args:
        weights: [n, V] non-negative; need not be normalised, but not all zero.
        keys: [n] subkeys of the purpose of the draw.
        positions: [n] absolute position each token will have.

    Returns:
        [n] int64 token ids: argmax of weight / exponential noise, which is a
        draw from the normalised weights and couples rows that share key and
        position (the Gumbel-max trick, arXiv 2408.07978).
    """
    num_rows, vocab_size = weights.shape
    rows, token_ids = weights.nonzero(as_tuple=True)  # [m] each
    # Drawing entry by entry computes four words to use one.
    if token_ids.numel() * 4 < weights.numel():
        noise = exponential_noise_at(keys, positions, rows, token_ids)
        scores = torch.zeros(num_rows, vocab_size, dtype=torch.float64, device=weights.device)
        scores[rows, token_ids] = weights[rows, token_ids].double() / noise
    else:
        scores = weights.double() / exponential_noise(keys, positions, vocab_size, weights.device)
    return scores.argmax(dim=1)


def truncate_to_support(probs: torch.Tensor, max_support: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cuts distributions to their likeliest tokens, before anything is drawn.

    Args:
        probs: [n, V] float32 probabilities.
        max_support: Most tokens kept per row.

    Returns:
        Token ids [n, s] int64 and renormalised float32 probabilities [n, s],
        likeliest first; entries past a row's support are 0.
    """
    top = probs.topk(min(max_support, probs.shape[1]), dim=1)
    return top.indices, top.values / top.values.sum(dim=1, keepdim=True)


def draw_from_distribution(distribution: DraftDistribution, uniform_prob: float) -> int:
    """Draws a token from a distribution exactly as it travels.

    Both sides call this: the drafter to draw, the target to check that the
    token it received is the draw. It runs in float64 on the CPU with sums in
    order, so that both get the same bits on any machine.

    Args:
        distribution: q, as sent.
        uniform_prob: The position's uniform number, in [0, 1).

    Returns:
        The token id: the first whose cumulative mass exceeds the uniform share.
    """
    cumulative = np.cumsum(distribution.probs, dtype=np.float64)
    index = int(np.searchsorted(cumulative, uniform_prob * cumulative[-1], side="right"))
    # Rounding can put the share on the total itself; then the last token with mass is meant.
    if index >= len(cumulative):
        index = int(np.flatnonzero(distribution.probs)[-1])
    return index if distribution.token_ids is None else int(distribution.token_ids[index])
