from __future__ import annotations

import pytest

from specdec.paged.block_pool import BlockPool, OutOfBlocksError
from specdec.paged.sequence_kv import SequenceKV


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
)
def test_blocks_for_tokens(num_tokens: int, num_blocks: int) -> None:
    assert BlockPool(10, 4).num_blocks_for(num_tokens) == num_blocks


def test_growing_to_what_fits_takes_nothing() -> None:
    pool = BlockPool(10, 4)
    kv = SequenceKV(pool)
    kv.grow(5)
    kv.grow(8)
    kv.grow(3)
    assert len(kv.block_table) == 2


def test_rollback_drops_blocks_grown_but_not_computed() -> None:
    pool = BlockPool(10, 4)
    kv = SequenceKV(pool)
    kv.grow(20)
    kv.num_computed_tokens = 6
    kv.rollback(100)
    assert kv.num_computed_tokens == 6
    assert len(kv.block_table) == 2


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    taken = pool.allocate(2)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.free(taken)
    assert sorted(pool.allocate(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    "tables",
    [[], [[0], [0]], [[0, 0]], [[0], [1]], [[7]], [[0, 99]]],
    ids=["lost", "shared", "twice", "held and free", "another", "unknown"],
)
def test_integrity_faults_are_seen(tables: list[list[int]]) -> None:
    pool = BlockPool(4, 4)
    pool.allocate(1)  # block 0
    pool.check_integrity([[0]])
    with pytest.raises(AssertionError, match="blocks"):
        pool.check_integrity(tables)


def test_cached_blocks_are_given_up_from_the_end_of_the_least_recently_used() -> None:
    pool = BlockPool(6, 2)
    old, young = SequenceKV(pool), SequenceKV(pool)
    for kv, tokens in ((old, [1, 1, 2, 2, 3, 3]), (young, [4, 4])):
        kv.grow(len(tokens))
        kv.num_computed_tokens = len(tokens)
        kv.remember(tokens, len(tokens))
        kv.release()
    assert (pool.num_free, pool.num_cached) == (6, 4)
    pool.allocate(3)  # two that were never used, and the end of the old one
    kv = SequenceKV(pool)
    kv.reuse([1, 1, 2, 2, 3, 3], 6)
    assert kv.num_computed_tokens == 4
    kv = SequenceKV(pool)
    kv.reuse([4, 4], 2)
    assert kv.num_computed_tokens == 2


def test_salts_keep_prefixes_apart() -> None:
    pool = BlockPool(6, 2)
    kv = SequenceKV(pool, b"one")
    kv.grow(2)
    kv.num_computed_tokens = 2
    kv.remember([7, 7], 2)
    other = SequenceKV(pool, b"other")
    other.reuse([7, 7], 2)
    assert other.num_computed_tokens == 0
    same = SequenceKV(pool, b"one")
    same.reuse([7, 7], 2)
    assert same.block_table == kv.block_table


def test_what_is_not_proven_is_neither_cached_nor_left_as_it_is() -> None:
    pool = BlockPool(6, 2)
    kv = SequenceKV(pool)
    kv.grow(4)
    kv.num_computed_tokens = 4
    kv.remember([1, 2, 3, 4], 2)
    kv.is_proven = False
    kv.remember([1, 2, 3, 4], 4)
    assert pool.num_cached == 1
    assert kv.release() == [1]
    assert kv.is_proven
