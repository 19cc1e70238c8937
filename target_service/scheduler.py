"""What the next step computes.

There is one kind of work: a sequence's item wants KV up to its last draft, and
some rows are missing. A first prefill, a prefill after preemption and a verify
differ only in how many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from specdec.paged.block_pool import BlockPool
from target_service.sequence import Sequence

# A sequence whose next round has not come for this long may lose its blocks to an
# older or younger one.
_IDLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step."""

    sequence: Sequence
    num_committed_rows: int
    """Committed tokens to compute, from the first one without KV."""
    is_final: bool
    """Whether the drafts come along and the item is decided; else a prefill chunk."""

    @property
    def num_rows(self) -> int:
        """Rows of the step this takes."""
        item = self.sequence.item
        assert item is not None
        return self.num_committed_rows + (len(item.proposal.token_ids) if self.is_final else 0)


class Scheduler:
    """Picks work, the longest waiting first, and finds blocks for it."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        evict: Callable[[Sequence], None],
        max_prefill_tokens: int,
        max_batch_size: int,
    ) -> None:
        """Sets the bounds of a step.

        Args:
            pool: Where blocks come from.
            evict: Frees a sequence's blocks, to make room for another.
            max_prefill_tokens: Most prompt tokens of a step, over all sequences.
            max_batch_size: Most sequences of a step.
        """
        self._pool = pool
        self._evict = evict
        self._max_prefill_tokens = max_prefill_tokens
        self._max_batch_size = max_batch_size
        self.num_preemptions = 0

    def schedule(self, sequences: Collection[Sequence]) -> list[Work]:
        """Picks the next step's work and allocates its blocks.

        Verifies go before prefills, so that a long prompt freezes nobody. When
        blocks run out, the youngest sequences lose theirs and are computed again
        later; the oldest always goes on.

        Args:
            sequences: All sequences.

        Returns:
            Work with blocks allocated; empty when nothing waits, or all blocks
            are held by older sequences that are about to go on.
        """
        waiting = sorted(
            (sequence for sequence in sequences if sequence.item is not None),
            key=lambda sequence: (sequence.num_missing_tokens > 1, sequence.waiting_since_s),
        )
        budget = self._max_prefill_tokens
        works: list[Work] = []
        for sequence in waiting:
            if len(works) == self._max_batch_size:
                break
            self._reuse_prefix(sequence)
            missing = sequence.num_missing_tokens
            rows = missing if missing == 1 else min(missing, budget)
            if rows == 0:
                continue
            work = Work(sequence, rows, is_final=rows == missing)
            if not self._make_room(work, works, sequences):
                continue
            budget -= rows if missing > 1 else 0
            works.append(work)
        return works

    @staticmethod
    def _reuse_prefix(sequence: Sequence) -> None:
        """Takes over KV that the cache has, at the start and after a preemption."""
        assert sequence.item is not None
        if not sequence.kv.block_table:
            # The last committed token is computed in any case: its logits are wanted.
            sequence.kv.reuse(sequence.token_ids, sequence.item.base_length - 1)
        if sequence.num_cached_tokens is None:
            num_reused = sequence.kv.num_computed_tokens
            sequence.num_cached_tokens = min(num_reused, sequence.num_prompt_tokens)

    def _make_room(self, work: Work, works: list[Work], sequences: Collection[Sequence]) -> bool:
        """Allocates a work's blocks, at the cost of other sequences if need be."""
        kv = work.sequence.kv
        num_tokens = kv.num_computed_tokens + work.num_rows
        missing = kv.num_missing_blocks(num_tokens)
        if missing > self._pool.num_free:
            for victim in self._victims(work, works, sequences):
                self._evict(victim)
                self.num_preemptions += 1
                if missing <= self._pool.num_free:
                    break
            else:
                return False
        kv.grow(num_tokens)
        return True

    def _victims(
        self, work: Work, works: list[Work], sequences: Collection[Sequence]
    ) -> list[Sequence]:
        """Whose blocks may be taken, youngest first.

        A sequence between two rounds is left alone unless it is younger, or its
        client has not read for long: else two sequences would take turns in
        computing everything again.
        """
        scheduled = {id(other.sequence) for other in works}
        now_s = time.monotonic()
        return sorted(
            (
                other
                for other in sequences
                if other.kv.block_table
                and id(other) not in scheduled
                and (
                    other.arrival > work.sequence.arrival
                    or (other.item is None and now_s - other.idle_since_s > _IDLE_S)
                )
            ),
            key=lambda other: -other.arrival,
        )
