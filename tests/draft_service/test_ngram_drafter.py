from __future__ import annotations

import random

import pytest

from draft_service.drafter import DraftSequence, OpenCommand, ProposeItem
from draft_service.ngram_drafter import NgramDrafter
from specdec.types import Acceptance, SamplingParams


def sequence_of(
    drafter: NgramDrafter,
    token_ids: list[int],
    stop_token_ids: frozenset[int] = frozenset(),
    num_tokens: int = 5,
) -> DraftSequence:
    opening = OpenCommand(
        sequence_id=1,
        epoch=1,
        token_ids=token_ids,
        drafter="ngram",
        params=SamplingParams(),
        acceptance=Acceptance.REJECTION,
        key=1,
        is_dense=False,
        stop_token_ids=stop_token_ids,
    )
    sequence = DraftSequence(1, opening, list(token_ids))
    drafter.open(sequence)
    ask(sequence, num_tokens)
    return sequence


def ask(sequence: DraftSequence, num_tokens: int) -> None:
    sequence.drafted.clear()
    sequence.item = ProposeItem(
        sequence_id=1,
        epoch=1,
        round_index=sequence.last_round_index + 1,
        base_length=len(sequence.token_ids),
        digest=b"",
        token_ids=[],
        num_speculative_tokens=num_tokens,
        deadline_s=None,
        traceparent="",
    )


def commit(
    drafter: NgramDrafter, sequence: DraftSequence, token_ids: list[int], start: int
) -> None:
    """As the engine does it."""
    drafter.commit(sequence, token_ids, start)
    sequence.token_ids[start:] = token_ids
    ask(sequence, 5)


def propose(drafter: NgramDrafter, sequence: DraftSequence) -> list[int]:
    (drafted,) = drafter.step([sequence])
    assert drafted.is_final
    assert drafted.draft_probs == []
    return drafted.token_ids


@pytest.fixture
def drafter() -> NgramDrafter:
    return NgramDrafter(max_ngram=3, min_acceptance=0.0)


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        # [1, 2] was followed by 3 4 5 ...
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5, 9, 1]),
        # ... and [7, 1, 2], which is longer, by 6, although [1, 2] was seen later.
        ([7, 1, 2, 6, 0, 1, 2, 3, 0, 7, 1, 2], [6, 0, 1, 2, 3]),
        # The latest occurrence of the same length.
        ([1, 2, 3, 0, 1, 2, 4, 0, 1, 2], [4, 0, 1, 2, 4]),
        # Only the bound's worth of tokens is compared: the latest [2, 3, 4] counts.
        ([1, 2, 3, 4, 8, 9, 2, 3, 4, 5, 1, 2, 3, 4], [5, 1, 2, 3, 4]),
        # Nothing like it before.
        ([1, 2, 3, 4], []),
        ([1], []),
        # A repetition goes on for as long as is asked.
        ([5, 5], [5, 5, 5, 5, 5]),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1, 2]),
    ],
)
def test_proposals_by_hand(
    drafter: NgramDrafter, token_ids: list[int], expected: list[int]
) -> None:
    assert propose(drafter, sequence_of(drafter, token_ids)) == expected


@pytest.mark.parametrize("num_tokens", [1, 2, 64])
def test_as_many_as_wanted(drafter: NgramDrafter, num_tokens: int) -> None:
    sequence = sequence_of(drafter, [1, 2, 3, 1, 2, 3], num_tokens=num_tokens)
    assert propose(drafter, sequence) == ([1, 2, 3] * 22)[:num_tokens]


def test_never_past_a_stop_id(drafter: NgramDrafter) -> None:
    token_ids = [1, 2, 3, 9, 4, 1, 2]
    assert propose(drafter, sequence_of(drafter, token_ids, frozenset({9}))) == [3]
    assert propose(drafter, sequence_of(drafter, token_ids, frozenset({3}))) == []


def by_search(token_ids: list[int], max_ngram: int, num_tokens: int) -> list[int]:
    """What is proposed, by looking through the text."""
    for size in range(min(max_ngram, len(token_ids)), 0, -1):
        for end in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[end - size : end] == token_ids[-size:]:
                copied = list(token_ids)
                for i in range(num_tokens):
                    copied.append(copied[end + i])
                return copied[len(token_ids) :]
    return []


def test_commits_and_rollbacks_leave_what_starting_over_gives() -> None:
    rng = random.Random(0)
    drafter = NgramDrafter(max_ngram=4, min_acceptance=0.0)
    sequence = sequence_of(drafter, [0])
    for _ in range(400):
        length = len(sequence.token_ids)
        start = length if rng.random() < 0.8 else rng.randrange(length + 1)
        held = sequence.token_ids[start:]
        if rng.random() < 0.3:
            held = [rng.randrange(4) for _ in held]
        token_ids = held + [rng.randrange(4) for _ in range(rng.randint(1, 4))]
        commit(drafter, sequence, token_ids, start)
        assert propose(drafter, sequence) == by_search(sequence.token_ids, 4, 5)
        if len(sequence.token_ids) > 60:
            sequence = sequence_of(drafter, [0])


def test_a_commit_that_repeats_held_tokens_adds_nothing(drafter: NgramDrafter) -> None:
    sequence = sequence_of(drafter, [1, 2, 3, 1])
    commit(drafter, sequence, [3, 1, 2], 2)
    assert sequence.token_ids == [1, 2, 3, 1, 2]
    assert propose(drafter, sequence) == [3, 1, 2, 3, 1]


def test_a_shorter_commit_forgets_the_tail(drafter: NgramDrafter) -> None:
    sequence = sequence_of(drafter, [1, 2, 3, 1, 2])
    commit(drafter, sequence, [4], 2)
    assert propose(drafter, sequence) == []
    commit(drafter, sequence, [1], 3)
    assert propose(drafter, sequence) == [2, 4, 1, 2, 4]


def test_sequences_do_not_know_of_each_other(drafter: NgramDrafter) -> None:
    texts = [[1, 2, 1], [1, 3, 1], [7], [4, 4]]
    sequences = [sequence_of(drafter, text) for text in texts]
    together = [drafted.token_ids for drafted in drafter.step(sequences)]
    assert together == [propose(drafter, sequence_of(drafter, text)) for text in texts]


def test_rejections_shorten_proposals_and_acceptances_lengthen_them() -> None:
    drafter = NgramDrafter(max_ngram=1, min_acceptance=0.1)
    bad = sequence_of(drafter, [1, 2, 1], num_tokens=10)
    good = sequence_of(drafter, [1, 1], num_tokens=10)
    first = len(propose(drafter, bad))
    assert 0 < first < 10
    for _ in range(60):
        for sequence in (bad, good):
            ask(sequence, 10)
            sequence.drafted = propose(drafter, sequence)
        wrong = 3 + len(bad.token_ids)
        drafter.commit(bad, [wrong, 1], len(bad.token_ids))
        bad.token_ids += [wrong, 1]
        accepted = [*good.drafted, 1]
        drafter.commit(good, accepted, len(good.token_ids))
        good.token_ids += accepted
    ask(bad, 10)
    ask(good, 10)
    assert len(propose(drafter, bad)) < first
    assert len(propose(drafter, good)) == 10


def test_release_and_open_again(drafter: NgramDrafter) -> None:
    sequence = sequence_of(drafter, [1, 2, 1])
    drafter.release(sequence)
    assert sequence.state is None
    drafter.open(sequence)
    assert propose(drafter, sequence) == [2, 1, 2, 1, 2]
