"""A standalone draft model: samples a chain, one token per draft step.

The draft's distribution goes through the same transforms as the target's, is
cut to its wire form and renormalised, and only then is the token drawn from
it: what is sent is what was sampled from.

All sequences share each forward. A sequence's KV is computed lazily: a commit
only rolls back to what is still valid, and the next step computes what is
missing, in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from draft_service.drafter import Drafted, Drafter, DraftSequence, Status
from specdec.logits import Prefix, adjust_logits
from specdec.paged.attention import PackedSequence
from specdec.paged.loading import LoadedModel
from specdec.paged.sequence_kv import SequenceKV
from specdec.randomness import uniform_prob
from specdec.sampling import (
    draw_from_distribution,
    draw_tokens,
    probs_from_logits,
    truncate_to_support,
)
from specdec.types import Acceptance, DraftDistribution


class ModelDrafter(Drafter):
    """Drafts with a causal LM of its own."""

    name = "model"

    def __init__(
        self, loaded: LoadedModel, *, max_prefill_tokens: int, sparse_support: int
    ) -> None:
        """Takes a loaded model.

        Args:
            loaded: The draft model.
            max_prefill_tokens: Most prompt tokens of a step, over all sequences.
            sparse_support: Largest support of a SPARSE distribution, in tokens.
        """
        self._model = loaded.model
        self._pool = loaded.model.block_pool
        self._context_size = loaded.context_size
        self._max_prefill_tokens = max_prefill_tokens
        self._sparse_support = sparse_support
        self._held: dict[int, DraftSequence] = {}  # by id(), oldest first

    def open(self, sequence: DraftSequence) -> None:
        """Starts without KV."""
        sequence.state = SequenceKV(self._pool)
        self._held[id(sequence)] = sequence

    def commit(self, sequence: DraftSequence, token_ids: list[int], start: int) -> None:
        """Keeps the KV of drafts that were retained; rolls back the rest."""
        held = (sequence.token_ids + sequence.drafted)[start:]
        num_equal = 0
        for old, new in zip(held, token_ids, strict=False):
            if old != new:
                break
            num_equal += 1
        # The last token's KV is computed with the step that needs its logits.
        sequence.state.rollback(min(start + num_equal, start + len(token_ids) - 1))

    def wants_step(self, sequence: DraftSequence) -> bool:
        """A prompt is computed ahead of the first proposal."""
        num_tokens = len(sequence.token_ids)
        if not sequence.is_prefilled_ahead or num_tokens > self._context_size:
            return False
        return _num_computed(sequence) < num_tokens - 1

    def step(self, sequences: Seq[DraftSequence]) -> list[Drafted]:
        """Computes one packed forward; adds a token to each proposal that is due one."""
        packed: list[PackedSequence] = []
        members: list[DraftSequence] = []
        num_logits: list[int] = []
        ended: list[Drafted] = []
        budget = self._max_prefill_tokens
        for sequence in sequences:
            tokens = sequence.token_ids + sequence.drafted
            if len(tokens) >= self._context_size:
                ended.append(Drafted(sequence, [], [], is_final=True))
                continue
            wants_token = sequence.num_wanted > 0
            if wants_token:
                sequence.is_prefilled_ahead = False  # from now on KV is computed when needed
            kv: SequenceKV = sequence.state
            if kv.block_table:
                kv.remember(sequence.token_ids, len(sequence.token_ids))
            else:
                kv.reuse(tokens, len(tokens) - 1)
            start = kv.num_computed_tokens
            missing = len(tokens) - start - (0 if wants_token else 1)
            rows = missing if missing == 1 else min(missing, budget)
            if rows <= 0:
                continue
            if not self._make_room(sequence, start + rows, members):
                sequence.is_prefilled_ahead = False
                ended.append(Drafted(sequence, [], [], True, Status.EXHAUSTED, "no free KV blocks"))
                continue
            budget -= rows if missing > 1 else 0
            packed.append(
                PackedSequence(tokens[start : start + rows], start, sequence.state.block_table)
            )
            members.append(sequence)
            num_logits.append(int(wants_token and rows == missing))
        if not packed:
            return ended
        logits = self._model.forward(packed, num_logits)
        for sequence, part in zip(members, packed, strict=True):
            sequence.state.num_computed_tokens += len(part.token_ids)
            sequence.state.is_proven = False
        due = [sequence for sequence, count in zip(members, num_logits, strict=True) if count]
        return ended + (self._draw(due, logits) if due else [])

    def _draw(self, sequences: list[DraftSequence], logits: torch.Tensor) -> list[Drafted]:
        """Draws one token per sequence; a row that is not finite ends its proposal."""
        is_finite = torch.isfinite(logits).all(dim=1)
        logits = torch.where(is_finite[:, None], logits, 0.0)
        params = [sequence.opening.params for sequence in sequences]
        prefixes = [
            Prefix(sequence.token_ids, sequence.opening.num_prompt_tokens, sequence.drafted)
            for sequence in sequences
        ]
        drawn: list[tuple[int, DraftDistribution | None]]
        if all(row.is_greedy for row in params):
            logits = adjust_logits(logits, params, prefixes)
            drawn = [(token_id, None) for token_id in logits.argmax(dim=1).tolist()]
        else:
            drawn = self._sample(sequences, probs_from_logits(logits, params, prefixes))
        results = []
        for sequence, (token_id, q), finite in zip(
            sequences, drawn, is_finite.tolist(), strict=True
        ):
            if not finite:
                results.append(_not_finite(sequence))
                self._clear(sequence.state.discard())
                continue
            sequence.state.is_proven = True
            is_last = sequence.num_wanted == 1
            results.append(Drafted(sequence, [token_id], [] if q is None else [q], is_last))
        return results

    def _sample(
        self, sequences: list[DraftSequence], probs: torch.Tensor
    ) -> list[tuple[int, DraftDistribution | None]]:
        """Draws from transformed probabilities [n, V], in each sequence's own way."""
        drawn: list[tuple[int, DraftDistribution | None]] = [(0, None)] * len(sequences)
        coupled = [
            i
            for i, sequence in enumerate(sequences)
            if sequence.opening.acceptance is Acceptance.COUPLED
            or sequence.opening.params.is_greedy
        ]
        if coupled:
            # One-hot rows of greedy sequences draw their argmax whatever the noise.
            keys = [sequences[i].opening.key for i in coupled]
            positions = [_position(sequences[i]) for i in coupled]
            token_ids = draw_tokens(probs[coupled], keys, positions).tolist()
            for i, token_id in zip(coupled, token_ids, strict=True):
                drawn[i] = (token_id, None)
        independent = sorted(set(range(len(sequences))) - set(coupled))
        if independent:
            support, sparse = truncate_to_support(probs[independent], self._sparse_support)
            for row, i in enumerate(independent):
                opening = sequences[i].opening
                if opening.is_dense:
                    q = DraftDistribution(probs[i].cpu().numpy(), None)
                else:
                    size = int((sparse[row] > 0).sum())
                    q = DraftDistribution(
                        sparse[row, :size].cpu().numpy(),
                        support[row, :size].cpu().numpy().astype("uint32"),
                    )
                uniform = uniform_prob(opening.key, _position(sequences[i]))
                drawn[i] = (draw_from_distribution(q, uniform), q)
        return drawn

    def _make_room(
        self, sequence: DraftSequence, num_tokens: int, members: list[DraftSequence]
    ) -> bool:
        """Allocates blocks, at the cost of sequences that draft nothing now if need be."""
        kv: SequenceKV = sequence.state
        missing = kv.num_missing_blocks(num_tokens)
        if missing > self._pool.num_free:
            busy = {id(other) for other in (*members, sequence)}
            for victim in reversed(self._held.values()):
                if id(victim) not in busy and victim.num_wanted == 0:
                    self._free(victim.state)
                    if missing <= self._pool.num_free:
                        break
            else:
                return False
        kv.grow(num_tokens)
        return True

    def _free(self, kv: SequenceKV) -> None:
        self._clear(kv.release())

    def _clear(self, block_ids: list[int]) -> None:
        """Clears freed blocks; a NaN in one would spread through masked reads."""
        if block_ids:
            self._model.kv.clear(block_ids)

    def release(self, sequence: DraftSequence) -> None:
        """Frees the sequence's blocks; full ones may stay cached."""
        if self._held.pop(id(sequence), None) is not None:
            sequence.state.remember(sequence.token_ids, len(sequence.token_ids))
            self._free(sequence.state)

    def fail(self, sequence: DraftSequence) -> None:
        """Frees the sequence's blocks, whatever the failed step left in them."""
        sequence.is_prefilled_ahead = False
        self._clear(sequence.state.discard())

    def check_integrity(self) -> None:
        """Checks that every block is free or held by exactly one sequence."""
        self._pool.check_integrity(held.state.block_table for held in self._held.values())


def _num_computed(sequence: DraftSequence) -> int:
    kv: SequenceKV = sequence.state
    return kv.num_computed_tokens


def _position(sequence: DraftSequence) -> int:
    """Absolute position of the next drafted token."""
    return len(sequence.token_ids) + len(sequence.drafted)


def _not_finite(sequence: DraftSequence) -> Drafted:
    return Drafted(sequence, [], [], True, Status.FAILED, "logits are not finite")
