"""Paged KV against a dense reference, over random histories.

The KV of a token depends on all tokens up to it. So here the memory holds, per
slot, exactly those tokens: a slot read by the wrong sequence, written twice, or
reused after a collision of hashes shows at once.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from specdec.paged.block_pool import BlockPool, OutOfBlocksError
from specdec.paged.sequence_kv import SequenceKV

NUM_BLOCKS = 12

# Few ids, so that prefixes meet.
token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=20)


class Holder:
    """A sequence: its tokens, and its KV."""

    def __init__(self, kv: SequenceKV, token_ids: list[int]) -> None:
        self.kv = kv
        self.token_ids = token_ids


class PagedHistory(RuleBasedStateMachine):
    """What engines do with sequences, in any order."""

    holders = Bundle("holders")

    @initialize(block_size=st.integers(1, 5), hash_bytes=st.sampled_from([1, 16]))
    def begin(self, block_size: int, hash_bytes: int) -> None:
        self.memory: list[tuple[int, ...] | None] = [None] * (NUM_BLOCKS * block_size)
        self.pool = BlockPool(
            NUM_BLOCKS, block_size, copy_block=self.copy_block, hash_bytes=hash_bytes
        )
        self.live: list[Holder] = []

    def copy_block(self, source: int, target: int) -> None:
        size = self.pool.block_size
        self.memory[target * size : (target + 1) * size] = self.memory[
            source * size : (source + 1) * size
        ]

    def slot(self, kv: SequenceKV, position: int) -> int:
        block, offset = divmod(position, self.pool.block_size)
        return kv.block_table[block] * self.pool.block_size + offset

    @rule(target=holders, token_ids=token_lists, salt=st.sampled_from([b"", b"tenant"]))
    def open(self, token_ids: list[int], salt: bytes) -> Holder:
        holder = Holder(SequenceKV(self.pool, salt), list(token_ids))
        self.live.append(holder)
        return holder

    @rule(holder=holders, num_drafts=st.integers(0, 4))
    def step(self, holder: Holder, num_drafts: int) -> None:
        """A prefill, or a verify with some drafts: all that is missing."""
        kv = holder.kv
        if not kv.block_table:
            kv.reuse(holder.token_ids, len(holder.token_ids) - 1)
        end = len(holder.token_ids) + num_drafts
        if kv.num_missing_blocks(end) > self.pool.num_free:
            before = (list(kv.block_table), self.pool.num_free)
            with pytest.raises(OutOfBlocksError):
                kv.grow(end)
            assert before == (kv.block_table, self.pool.num_free)
            return
        kv.grow(end)
        tokens = holder.token_ids + random.choices([0, 1], k=num_drafts)
        for position in range(kv.num_computed_tokens, end):
            self.memory[self.slot(kv, position)] = tuple(tokens[: position + 1])
        # Some drafts are accepted, and one more token is emitted.
        num_accepted = random.randint(0, num_drafts)
        kv.num_computed_tokens = len(holder.token_ids) + num_accepted
        kv.rollback(kv.num_computed_tokens)
        holder.token_ids = [*tokens[: kv.num_computed_tokens], random.randint(0, 1)]

    @rule(holder=holders, share=st.floats(0, 1))
    def retain(self, holder: Holder, share: float) -> None:
        """The orchestrator retained only a part of what was emitted."""
        num_tokens = max(1, round(len(holder.token_ids) * share))
        del holder.token_ids[num_tokens:]
        holder.kv.rollback(num_tokens - 1)
        holder.kv.remember(holder.token_ids, num_tokens)

    @rule(target=holders, holder=holders, share=st.floats(0, 1))
    def fork(self, holder: Holder, share: float) -> Holder:
        num_tokens = round(holder.kv.num_computed_tokens * share)
        child = Holder(
            holder.kv.fork(num_tokens), [*holder.token_ids[:num_tokens], random.randint(0, 1)]
        )
        self.live.append(child)
        return child

    @rule(holder=holders)
    def preempt(self, holder: Holder) -> None:
        holder.kv.release()

    @rule(target=holders, holder=consumes(holders))
    def release(self, holder: Holder) -> object:
        holder.kv.release()
        self.live = [other for other in self.live if other is not holder]
        return multiple()

    @invariant()
    def reads_like_a_dense_memory(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(holder.kv.block_table for holder in self.live)
        for holder in self.live:
            for position in range(holder.kv.num_computed_tokens):
                expected = tuple(holder.token_ids[: position + 1])
                assert self.memory[self.slot(holder.kv, position)] == expected

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for holder in self.live:
                holder.kv.release()
            self.pool.check_integrity([])
            assert self.pool.num_free == NUM_BLOCKS


TestPagedHistory = PagedHistory.TestCase
TestPagedHistory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
