from __future__ import annotations

import random

import pytest

from specdec.digest import PrefixDigest


def digest_of(token_ids: list[int], salt: bytes = b"") -> bytes:
    return PrefixDigest(salt).digest(token_ids, len(token_ids))


def test_prefixes_have_digests_of_their_own() -> None:
    token_ids = list(range(100))
    digest = PrefixDigest()
    digests = [digest.digest(token_ids, length) for length in range(101)]
    assert len(set(digests)) == 101
    assert all(len(value) == 16 for value in digests)
    assert digests == [digest_of(token_ids[:length]) for length in range(101)]


@pytest.mark.parametrize("index", [0, 15, 16, 31, 40])
def test_every_token_counts(index: int) -> None:
    token_ids = list(range(41))
    changed = [*token_ids]
    changed[index] += 1000
    assert digest_of(changed) != digest_of(token_ids)


def test_order_counts() -> None:
    assert digest_of([1, 2]) != digest_of([2, 1])


def test_zeros_count() -> None:
    assert len({digest_of([0] * length) for length in range(40)}) == 40


def test_salts_never_agree() -> None:
    for length in (0, 1, 16, 33):
        assert len({digest_of([5] * length, salt) for salt in (b"", b"a", b"b")}) == 3


def test_ids_up_to_32_bits() -> None:
    assert digest_of([2**32 - 1]) != digest_of([0])


def test_growing_and_shrinking_agrees_with_starting_over() -> None:
    rng = random.Random(1)
    digest, token_ids = PrefixDigest(b"salt"), [0]
    for _ in range(500):
        if rng.random() < 0.3:
            length = rng.randrange(len(token_ids) + 1)
            digest.rollback(length)
            del token_ids[length:]
        token_ids += [rng.randrange(50) for _ in range(rng.randrange(20))]
        length = rng.randrange(len(token_ids) + 1)
        assert digest.digest(token_ids, length) == digest_of(token_ids[:length], b"salt")


def test_rollback_to_the_middle_of_a_block_forgets_the_block() -> None:
    digest = PrefixDigest()
    digest.digest([1] * 32, 32)
    digest.rollback(20)
    token_ids = [1] * 20 + [2] * 12
    assert digest.digest(token_ids, 32) == digest_of(token_ids)
