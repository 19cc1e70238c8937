from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.paged.block_pool import BlockPool, OutOfBlocksError, SequenceKV

NUM_BLOCKS = 12
NUM_SEQUENCES = 4

step = st.tuples(
    st.sampled_from(["grow", "rollback", "release"]),
    st.integers(0, NUM_SEQUENCES - 1),
    st.integers(0, 60),
)


@settings(max_examples=200, deadline=None)
@given(block_size=st.integers(1, 6), steps=st.lists(step, max_size=60))
def test_a_paged_memory_reads_like_a_dense_one(
    block_size: int, steps: list[tuple[str, int, int]]
) -> None:
    """Every token written is found again, however sequences grow and shrink."""
    pool = BlockPool(NUM_BLOCKS, block_size)
    memory = np.full(NUM_BLOCKS * block_size, -1)
    sequences = [SequenceKV(pool) for _ in range(NUM_SEQUENCES)]
    dense: list[list[int]] = [[] for _ in sequences]
    next_value = 0

    def slots(kv: SequenceKV, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        table = np.array(kv.block_table, dtype=np.int64)
        return table[positions // block_size] * block_size + positions % block_size

    for action, i, amount in steps:
        kv = sequences[i]
        if action == "grow":
            wanted = len(dense[i]) + amount
            num_free, table = pool.num_free, list(kv.block_table)
            if kv.num_missing_blocks(wanted) > pool.num_free:
                with pytest.raises(OutOfBlocksError):
                    kv.grow(wanted)
                assert (pool.num_free, kv.block_table) == (num_free, table)
            else:
                kv.grow(wanted)
                values = list(range(next_value, next_value + amount))
                next_value += amount
                memory[slots(kv, len(dense[i]), wanted)] = values
                dense[i] += values
                kv.num_computed_tokens = wanted
        elif action == "rollback":
            kv.rollback(amount)
            del dense[i][amount:]
            assert len(kv.block_table) == pool.num_blocks_for(len(dense[i]))
        else:
            held = list(kv.block_table)
            assert kv.release() == held
            dense[i].clear()
        pool.check_integrity(sequence.block_table for sequence in sequences)
        for sequence, values in zip(sequences, dense, strict=True):
            assert sequence.num_computed_tokens == len(values)
            assert memory[slots(sequence, 0, len(values))].tolist() == values
    for kv in sequences:
        kv.release()
    pool.check_integrity([])
    assert pool.num_free == NUM_BLOCKS


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
