"""What the next step computes.

There is one kind of work: a sequence's item wants KV up to its last draft, and
some rows are missing. A first prefill, a prefill after preemption and a verify
differ only in how many.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from specdec.paged.block_pool import BlockPool
from target_service.sequence import Sequence


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
    """Picks work, oldest sequence first, and finds blocks for it."""

    def __init__(self, pool: BlockPool, *, max_prefill_tokens: int, max_batch_size: int) -> None:
        """Sets the bounds of a step.

        Args:
            pool: Where blocks come from.
            max_prefill_tokens: Most prompt tokens of a step, over all sequences.
            max_batch_size: Most sequences of a step.
        """
        self._pool = pool
        self._max_prefill_tokens = max_prefill_tokens
        self._max_batch_size = max_batch_size
        self.num_preemptions = 0

    def schedule(self, sequences: Collection[Sequence]) -> list[Work]:
        """Picks the next step's work and allocates its blocks.

        Sequences that want a token or two go before prefills, so that a long
        prompt freezes nobody. When blocks run out, the youngest sequences lose
        theirs and are computed again later; the oldest always goes on.

        Args:
            sequences: All sequences, oldest first.

        Returns:
            Work with blocks allocated; not empty when some item waits.
        """
        waiting = [sequence for sequence in sequences if sequence.item is not None]
        waiting.sort(key=lambda sequence: sequence.num_missing_tokens > 1)  # stable: by age
        budget = self._max_prefill_tokens
        works: list[Work] = []
        for sequence in waiting:
            if len(works) == self._max_batch_size:
                break
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

    def _make_room(self, work: Work, works: list[Work], sequences: Collection[Sequence]) -> bool:
        """Allocates a work's blocks, at the cost of younger sequences if need be."""
        kv = work.sequence.kv
        num_tokens = kv.num_computed_tokens + work.num_rows
        missing = kv.num_missing_blocks(num_tokens)
        if missing > self._pool.num_free:
            scheduled = {id(other.sequence) for other in works}
            for victim in sorted(sequences, key=lambda other: -other.arrival):
                if victim.arrival <= work.sequence.arrival:
                    return False
                if victim.kv.block_table and id(victim) not in scheduled:
                    victim.kv.release()
                    self.num_preemptions += 1
                    if missing <= self._pool.num_free:
                        break
            else:
                return False
        kv.grow(num_tokens)
        return True
