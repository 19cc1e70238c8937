"""Prompt lookup: proposes what followed the last time the text read like this.

The longest suffix of the committed tokens, of `max_ngram` down to 1 tokens,
that occurs earlier is looked up, and the tokens after its latest occurrence
are proposed (prompt lookup decoding, as `prompt_lookup_num_tokens` in
transformers' generate). The proposal is deterministic, so the match rule
verifies it; it needs no model and costs a few dictionary look-ups.

A drafted token costs the target a row, so a proposal ends where it is unlikely
to be reached: the drafter keeps, per sequence and length of the matched suffix,
how many drafted tokens were accepted, and proposes k tokens only while
acceptance_rate ** k is at least `min_acceptance`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from draft_service.drafter import Drafted, Drafter, DraftSequence

# What a drafted token's acceptance is taken to be before a sequence has told, by
# the length of the matched suffix, and how many drafted tokens that belief is
# worth; from greedy runs of a small chat model on chat, code and summaries.
_PRIOR_ACCEPTANCE = (0.45, 0.6, 0.75, 0.85)
_PRIOR_WEIGHT = 8.0
# Each round counts this much more than the one before: text changes its nature.
_DECAY = 0.98


class NgramDrafter(Drafter):
    """Proposes by n-gram look-up in the sequence's own tokens."""

    name = "ngram"
    owns_device = False

    def __init__(self, max_ngram: int, min_acceptance: float) -> None:
        """Sets the bounds.

        Args:
            max_ngram: Longest suffix looked up, in tokens, at least 1.
            min_acceptance: Least probability, in [0, 1), with which a proposed
                token is reached and accepted; 0 proposes all that is asked for.
        """
        self._max_ngram = max_ngram
        self._min_acceptance = min_acceptance

    def open(self, sequence: DraftSequence) -> None:
        """Indexes the tokens so far."""
        sequence.state = _NgramState(self._max_ngram)
        sequence.state.index.extend(sequence.token_ids)

    def commit(self, sequence: DraftSequence, token_ids: list[int], start: int) -> None:
        """Counts what was accepted and indexes the tokens that are new."""
        num_held = len(sequence.token_ids)
        if sequence.token_ids[start:] != token_ids[: num_held - start]:
            sequence.token_ids[start:] = token_ids  # committed tokens changed: start over
            self.open(sequence)
            return
        new = token_ids[num_held - start :]
        sequence.state.acceptance.count(sequence.drafted, new)
        sequence.state.index.extend(new)

    def step(self, sequences: Seq[DraftSequence]) -> list[Drafted]:
        """Proposes all a sequence gets in this round at once."""
        return [
            Drafted(sequence, self._propose(sequence), [], is_final=True) for sequence in sequences
        ]

    def _propose(self, sequence: DraftSequence) -> list[int]:
        state: _NgramState = sequence.state
        size, start = state.index.find_suffix()
        if size == 0:
            return []
        num_tokens = state.acceptance.choose(size, sequence.num_wanted, self._min_acceptance)
        proposal = state.index.continuation(start, num_tokens)
        # What follows an end of text belongs to another text.
        for i, token_id in enumerate(proposal):
            if token_id in sequence.opening.stop_token_ids:
                return proposal[:i]
        return proposal

    def release(self, sequence: DraftSequence) -> None:
        """Drops the index."""
        sequence.state = None


class _NgramState:
    """What is kept of one sequence."""

    def __init__(self, max_ngram: int) -> None:
        self.index = _NgramIndex(max_ngram)
        self.acceptance = _Acceptance(max_ngram)


class _Acceptance:
    """How often drafted tokens were accepted, by length of the matched suffix."""

    def __init__(self, max_ngram: int) -> None:
        priors = [_PRIOR_ACCEPTANCE[min(i, len(_PRIOR_ACCEPTANCE) - 1)] for i in range(max_ngram)]
        self._num_accepted = [prior * _PRIOR_WEIGHT for prior in priors]
        self._num_tried = [_PRIOR_WEIGHT] * max_ngram
        self._size = 0

    def choose(self, size: int, num_wanted: int, min_acceptance: float) -> int:
        """How many tokens to propose after a match of `size` tokens."""
        self._size = size
        rate = self._num_accepted[size - 1] / self._num_tried[size - 1]
        num_tokens, reached = 0, rate
        while num_tokens < num_wanted and reached >= min_acceptance:
            num_tokens, reached = num_tokens + 1, reached * rate
        return num_tokens

    def count(self, drafted: list[int], committed: list[int]) -> None:
        """Learns from the last proposal; tokens after a rejected one were not tried."""
        if not drafted:
            return
        accepted = 0
        for draft, token_id in zip(drafted, committed, strict=False):
            if draft != token_id:
                break
            accepted += 1
        row = self._size - 1
        self._num_accepted[row] = self._num_accepted[row] * _DECAY + accepted
        self._num_tried[row] = self._num_tried[row] * _DECAY + min(accepted + 1, len(drafted))


class _NgramIndex:
    """Where each n-gram last ended, for all lengths up to a bound."""

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self._tokens: list[int] = []
        # (n-gram) -> index after its latest occurrence that something follows.
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            # Only now does something follow the n-grams that end here.
            end = len(self._tokens)
            for size in range(1, min(self._max_ngram, end) + 1):
                self._ends[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token_id)

    def find_suffix(self) -> tuple[int, int]:
        """Longest suffix seen before: its length, and the index after its latest occurrence."""
        tokens = self._tokens
        for size in range(min(self._max_ngram, len(tokens)), 0, -1):
            start = self._ends.get(tuple(tokens[-size:]))
            if start is not None:
                return size, start
        return 0, 0

    def continuation(self, start: int, num_tokens: int) -> list[int]:
        """The tokens from `start` on; a repetition that reaches the end goes on with its copy."""
        period = len(self._tokens) - start
        return [self._tokens[start + i % period] for i in range(num_tokens)]
