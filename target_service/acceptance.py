"""The two acceptance rules, for chains. Nothing else decides what is emitted.

Terms. A chain of K drafted tokens is verified with K + 1 rows: row j holds the
target's distribution p at position L + j, given the committed tokens and the
first j drafts. The output is the accepted prefix and one more token.

Rejection (arXiv 2211.17192, Algorithm 1; arXiv 2302.01318, Algorithm 2), for
tokens drawn from q: token j is accepted iff u < min(1, p/q); at the first
rejection a recovered token is drawn from the residual norm(max(0, p - q)); if
all are accepted, a bonus token is drawn from the last row.

Match, for deterministic proposals and for those drawn with common random
numbers (arXiv 2408.07978): the target draws its own token y at each row; a
draft equal to y is accepted, the first y that differs is the recovered token,
the y past the last draft is the bonus. The output is the target's own draws
whatever is proposed, so no drafter can bias it. At temperature 0, y is the
argmax, whatever form the proposal has.

Example, by hand: drafts [7, 7, 5] and own draws [7, 7, 2, 9] give the output
[7, 7, 2] with 2 accepted tokens; drafts [7, 7, 2] give [7, 7, 2, 9] with 3.

Shapes: B = chains, R = rows of all chains, V = vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specdec.logits import Prefix, adjust_logits
from specdec.randomness import uniform_prob, uniform_probs
from specdec.sampling import draw_from_distribution, draw_tokens, probs_from_logits
from specdec.types import DraftDistribution, SamplingKeys, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """One sequence's proposal, to be verified."""

    draft_token_ids: tuple[int, ...]
    """K drafted tokens."""
    draft_probs: tuple[DraftDistribution, ...]
    """q of each of them; empty: the match rule applies."""
    params: SamplingParams
    keys: SamplingKeys
    base_length: int
    """L, the position of the token that row 0 decides."""
    prefix: Prefix | None = None
    """The L committed tokens; needed if the parameters shape logits."""

    @property
    def num_rows(self) -> int:
        """K + 1."""
        return len(self.draft_token_ids) + 1

    @property
    def row_prefixes(self) -> list[Prefix | None]:
        """[K + 1] what comes before each row: row j stands on the first j drafts."""
        prefix, drafts = self.prefix, self.draft_token_ids
        if prefix is None:
            return [None] * self.num_rows
        return [replace(prefix, drafts=drafts[:j]) for j in range(self.num_rows)]

    @property
    def uses_rejection(self) -> bool:
        """Whether the rejection rule applies."""
        return bool(self.draft_probs) and not self.params.is_greedy


@dataclass(frozen=True, slots=True)
class ChainOutcome:
    """What one chain emits."""

    output_token_ids: tuple[int, ...]
    """Accepted tokens, then one recovered or bonus token; empty if not finite."""
    num_accepted_tokens: int
    is_finite: bool = True
    """False when the chain's logits have a NaN or an infinity."""


def accept_probs(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """The probability of accepting a drafted token, min(1, p/q).

    Args:
        target_probs: [n] p of the drafted token, any float dtype.
        draft_probs: [n] q of the drafted token, positive.

    Returns:
        [n] in [0, 1].
    """
    return (target_probs / draft_probs).clamp(max=1.0)


def residual_probs(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """What a recovered token is drawn from, max(0, p - q), not normalised.

    Args:
        target_probs: [n, V] p, any float dtype.
        draft_probs: [n, V] q.

    Returns:
        [n, V]. A row whose residual is all zero (p = q up to rounding, where a
        rejection has probability zero but for rounding) is p itself.
    """
    residual = (target_probs - draft_probs).clamp(min=0.0)
    is_zero = residual.sum(dim=1, keepdim=True) == 0.0
    return torch.where(is_zero, target_probs, residual)


def is_redrawn(chain: Chain) -> bool:
    """Whether redrawing each token from its q and the propose key gives it again.

    A drafter that truncates or rounds q after sampling, or that drops or
    replaces drawn tokens, would bend the output; it is caught here.
    """
    return redraw(chain).draft_token_ids == chain.draft_token_ids


def redraw(chain: Chain) -> Chain:
    """Makes a chain what its q's and the propose key draw.

    Args:
        chain: With a q for each token.

    Returns:
        The chain up to the first token that is not the draw, which is replaced
        by the draw. Where it ends depends on nothing drawn later, so the output
        is exact. To set the proposal aside would bend it: whether a token
        passes depends on its value.
    """
    drafts: list[int] = []
    for token_id, distribution in zip(chain.draft_token_ids, chain.draft_probs, strict=True):
        uniform = uniform_prob(chain.keys.propose, chain.base_length + len(drafts))
        drafts.append(draw_from_distribution(distribution, uniform))
        if drafts[-1] != token_id:
            break
    return replace(
        chain, draft_token_ids=tuple(drafts), draft_probs=chain.draft_probs[: len(drafts)]
    )


def verify_chains(logits: torch.Tensor, chains: Sequence[Chain]) -> list[ChainOutcome]:
    """Decides what each chain of one step emits.

    Args:
        logits: [R, V] float32 raw target logits, the rows of each chain in
            order, chain after chain.
        chains: [B] chains with drafted ids below V.

    Returns:
        [B] outcomes.
    """
    starts = _starts(chains)
    is_finite = torch.isfinite(logits).all(dim=1).tolist()  # [R]
    row_is_finite = all(is_finite)
    if not row_is_finite:
        # Rows of a broken chain are computed as zeros and thrown away below.
        logits = torch.where(torch.isfinite(logits), logits, 0.0)
    if all(chain.params.is_greedy for chain in chains):
        logits = adjust_logits(logits, *_rows(chains))
        outcomes = _match(logits.argmax(dim=1).tolist(), chains, starts)
    else:
        outcomes = _verify_sampled(logits, chains, starts)
    if row_is_finite:
        return outcomes
    return [
        outcome if all(is_finite[start : start + chain.num_rows]) else ChainOutcome((), 0, False)
        for outcome, chain, start in zip(outcomes, chains, starts, strict=True)
    ]


def _verify_sampled(
    logits: torch.Tensor, chains: Sequence[Chain], starts: list[int]
) -> list[ChainOutcome]:
    """Verifies a step in which some chain samples: one draw for all its tokens."""
    probs = probs_from_logits(logits, *_rows(chains))  # [R, V]
    num_accepted = _accept_by_rejection(probs, chains, starts)

    # What is drawn: every row of a match chain, the deciding row of a rejection chain.
    rows: list[int] = []
    keys: list[int] = []
    positions: list[int] = []
    residuals: list[tuple[int, int, DraftDistribution]] = []  # (draw, row, q)
    for chain, start, accepted in zip(chains, starts, num_accepted, strict=True):
        if accepted is None:
            rows += range(start, start + chain.num_rows)
            keys += [chain.keys.target] * chain.num_rows
            positions += range(chain.base_length, chain.base_length + chain.num_rows)
            continue
        is_bonus = accepted == len(chain.draft_token_ids)
        if not is_bonus:
            residuals.append((len(rows), start + accepted, chain.draft_probs[accepted]))
        rows.append(start + accepted)
        keys.append(chain.keys.target if is_bonus else chain.keys.residual)
        positions.append(chain.base_length + accepted)
    weights = probs if len(rows) == len(probs) else probs[rows]
    if residuals:
        draws = [draw for draw, _, _ in residuals]
        draft_probs = _dense([q for _, _, q in residuals], probs)
        weights = weights.clone() if weights is probs else weights
        weights[draws] = residual_probs(weights[draws], draft_probs)
    drawn = draw_tokens(weights, keys, positions).tolist()

    outcomes = []
    next_draw = 0
    for chain, accepted in zip(chains, num_accepted, strict=True):
        if accepted is None:
            own = drawn[next_draw : next_draw + chain.num_rows]
            outcomes += _match(own, [chain], [0])
            next_draw += chain.num_rows
        else:
            output = (*chain.draft_token_ids[:accepted], drawn[next_draw])
            outcomes.append(ChainOutcome(output, accepted))
            next_draw += 1
    return outcomes


def _accept_by_rejection(
    probs: torch.Tensor, chains: Sequence[Chain], starts: list[int]
) -> list[int | None]:
    """Counts each rejection chain's accepted tokens; None for match chains."""
    rows: list[int] = []
    token_ids: list[int] = []
    draft_probs: list[float] = []
    keys: list[int] = []
    positions: list[int] = []
    for chain, start in zip(chains, starts, strict=True):
        if not chain.uses_rejection:
            continue
        rows += range(start, start + len(chain.draft_token_ids))
        token_ids += chain.draft_token_ids
        draft_probs += map(_prob_of, chain.draft_probs, chain.draft_token_ids)
        keys += [chain.keys.accept] * len(chain.draft_token_ids)
        positions += range(chain.base_length, chain.base_length + len(chain.draft_token_ids))
    accepted: list[bool] = []
    if rows:
        p = probs[rows, token_ids]  # [n]
        q = torch.tensor(draft_probs, dtype=probs.dtype).to(probs.device)
        threshold = accept_probs(p, q).double().cpu()
        accepted = (uniform_probs(keys, positions) < threshold).tolist()
    counts: list[int | None] = []
    first = 0
    for chain in chains:
        if not chain.uses_rejection:
            counts.append(None)
            continue
        flags = accepted[first : first + len(chain.draft_token_ids)]
        counts.append(flags.index(False) if False in flags else len(flags))
        first += len(flags)
    return counts


def _match(
    own_token_ids: list[int], chains: Sequence[Chain], starts: list[int]
) -> list[ChainOutcome]:
    """Applies the match rule given the target's own token at every row."""
    outcomes = []
    for chain, start in zip(chains, starts, strict=True):
        accepted = 0
        for drafted, own in zip(chain.draft_token_ids, own_token_ids[start:], strict=False):
            if drafted != own:
                break
            accepted += 1
        output = tuple(own_token_ids[start : start + accepted + 1])
        outcomes.append(ChainOutcome(output, accepted))
    return outcomes


def _rows(chains: Sequence[Chain]) -> tuple[list[SamplingParams], list[Prefix | None]]:
    """Parameters and prefix of each row."""
    params = [chain.params for chain in chains for _ in range(chain.num_rows)]
    return params, [prefix for chain in chains for prefix in chain.row_prefixes]


def _starts(chains: Sequence[Chain]) -> list[int]:
    """First row of each chain."""
    starts, row = [], 0
    for chain in chains:
        starts.append(row)
        row += chain.num_rows
    return starts


def _prob_of(distribution: DraftDistribution, token_id: int) -> float:
    """Q of one token; the redraw check has made sure that it is positive."""
    if distribution.token_ids is None:
        return float(distribution.probs[token_id])
    return float(distribution.probs[(distribution.token_ids == token_id).argmax()])


def _dense(distributions: list[DraftDistribution], like: torch.Tensor) -> torch.Tensor:
    """Stacks distributions as [n, V] rows in the dtype and on the device of `like`."""
    dense = torch.zeros(len(distributions), like.shape[1], dtype=like.dtype)
    for row, distribution in zip(dense, distributions, strict=True):
        # A copy: what was read from the wire is read-only.
        probs = torch.tensor(distribution.probs, dtype=like.dtype)
        if distribution.token_ids is None:
            row[: len(probs)] = probs
        else:
            row[torch.from_numpy(distribution.token_ids.astype("int64"))] = probs
    return dense.to(like.device)
