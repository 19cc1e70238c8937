"""Runs one step's work through the model and the acceptance rules."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from specdec.logits import Prefix, token_logprobs
from specdec.paged.attention import PackedSequence
from specdec.paged.model import PagedModel
from specdec.types import TokenLogprobs, VerifyResult
from target_service.acceptance import Chain, ChainOutcome, is_redrawn, redraw, verify_chains
from target_service.scheduler import Work


class NonFiniteLogitsError(Exception):
    """The model's logits for one sequence have a NaN or an infinity."""


class ModelRunner:
    """The packed forward and what follows it."""

    def __init__(self, model: PagedModel) -> None:
        """Takes the model over the paged pool."""
        self._model = model

    def run(self, works: Seq[Work]) -> list[VerifyResult | NonFiniteLogitsError | None]:
        """Computes the step.

        Args:
            works: At least one, blocks allocated.

        Returns:
            Per work its result, an error of its own, or None for a prefill
            chunk that decides nothing.
        """
        chains: list[Chain] = []
        mismatches: list[bool] = []
        sequences, num_logits = [], []
        for work in works:
            sequence, item = work.sequence, work.sequence.item
            assert item is not None
            start = sequence.kv.num_computed_tokens
            rows = sequence.token_ids[start : start + work.num_committed_rows]
            num_logits.append(0)
            if work.is_final:
                chain = Chain(
                    draft_token_ids=item.proposal.token_ids,
                    draft_probs=item.proposal.draft_probs,
                    params=sequence.params,
                    keys=sequence.keys,
                    base_length=item.base_length,
                    prefix=(
                        Prefix(sequence.token_ids, sequence.num_prompt_tokens)
                        if sequence.params.shapes_logits
                        else None
                    ),
                )
                is_mismatch = chain.uses_rejection and not is_redrawn(chain)
                if is_mismatch:
                    chain = redraw(chain)
                chains.append(chain)
                mismatches.append(is_mismatch)
                rows = [*rows, *chain.draft_token_ids]
                num_logits[-1] = chain.num_rows
            sequences.append(PackedSequence(rows, start, sequence.kv.block_table))
        logits = self._model.forward(sequences, num_logits)  # [sum(num_logits), V]
        decided = verify_chains(logits, chains)
        logprobs = _logprobs(logits, chains, decided)
        outcomes = iter(zip(chains, mismatches, decided, logprobs, strict=True))

        results: list[VerifyResult | NonFiniteLogitsError | None] = []
        for work in works:
            if not work.is_final:
                results.append(None)
                continue
            chain, is_mismatch, outcome, chain_logprobs = next(outcomes)
            if not outcome.is_finite:
                results.append(NonFiniteLogitsError())
                continue
            results.append(
                VerifyResult(
                    output_token_ids=outcome.output_token_ids,
                    num_accepted_tokens=outcome.num_accepted_tokens,
                    num_draft_tokens=len(chain.draft_token_ids),
                    redraw_mismatch=is_mismatch,
                    logprobs=chain_logprobs,
                )
            )
        return results


def _logprobs(
    logits: torch.Tensor, chains: Seq[Chain], outcomes: Seq[ChainOutcome]
) -> list[tuple[TokenLogprobs, ...]]:
    """Log-probabilities of each chain's output, where they are wanted."""
    found: list[tuple[TokenLogprobs, ...]] = []
    row = 0
    for chain, outcome in zip(chains, outcomes, strict=True):
        tokens, num_top = outcome.output_token_ids, chain.params.logprobs
        rows = logits[row : row + len(tokens)]
        row += chain.num_rows
        found.append(() if num_top is None else tuple(token_logprobs(rows, tokens, num_top)))
    return found
