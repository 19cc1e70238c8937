"""Prompt lookup: proposes what followed the last time the text read like this.

The longest suffix of the committed tokens, of `max_ngram` down to 1 tokens,
that occurs earlier is looked up, and the tokens after its latest occurrence
are proposed (prompt lookup decoding, as `prompt_lookup_num_tokens` in
transformers' generate). The proposal is deterministic, so the match rule
verifies it; it needs no model and costs a few dictionary look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from draft_service.drafter import Drafted, Drafter, DraftSequence


class NgramDrafter(Drafter):
    """Proposes by n-gram look-up in the sequence's own tokens."""

    name = "ngram"

    def __init__(self, max_ngram: int) -> None:
        """Sets the longest suffix.

        Args:
            max_ngram: In tokens, at least 1.
        """
        self._max_ngram = max_ngram

    def open(self, sequence: DraftSequence) -> None:
        """Indexes the tokens so far."""
        sequence.state = _NgramIndex(self._max_ngram)
        sequence.state.extend(sequence.token_ids)

    def commit(self, sequence: DraftSequence, token_ids: list[int], start: int) -> None:
        """Indexes the committed tokens that are new."""
        if sequence.token_ids[start:] != token_ids[: len(sequence.token_ids) - start]:
            sequence.state = _NgramIndex(self._max_ngram)  # committed tokens changed: start over
            start, token_ids = 0, sequence.token_ids[:start] + token_ids
        sequence.state.extend(token_ids[sequence.state.num_tokens - start :])

    def step(self, sequences: Seq[DraftSequence]) -> list[Drafted]:
        """Proposes all a sequence wants at once."""
        return [
            Drafted(sequence, self._propose(sequence), [], is_final=True) for sequence in sequences
        ]

    def _propose(self, sequence: DraftSequence) -> list[int]:
        index: _NgramIndex = sequence.state
        proposal = index.continuation(sequence.num_wanted)
        # What follows an end of text belongs to another text.
        for i, token_id in enumerate(proposal):
            if token_id in sequence.opening.stop_token_ids:
                return proposal[:i]
        return proposal

    def release(self, sequence: DraftSequence) -> None:
        """Drops the index."""
        sequence.state = None


class _NgramIndex:
    """Where each n-gram last ended, for all lengths up to a bound."""

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._tokens: list[int] = []
        # (n-gram) -> index after its latest occurrence that something follows.
        self._ends: dict[tuple[int, ...], int] = {}

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            # Only now does something follow the n-grams that end here.
            end = len(self._tokens)
            for size in range(1, min(self._max_ngram, end) + 1):
                self._ends[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token_id)

    def continuation(self, num_tokens: int) -> list[int]:
        """Tokens after the latest earlier occurrence of the longest suffix."""
        tokens = self._tokens
        for size in range(min(self._max_ngram, len(tokens)), 0, -1):
            start = self._ends.get(tuple(tokens[-size:]))
            if start is not None:
                break
        else:
            return []
        # A repetition that reaches the end goes on with its own copy.
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(num_tokens)]
