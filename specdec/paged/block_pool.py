"""Fixed-size blocks of KV memory and who holds them.

A block has room for `block_size` tokens. Token t of a sequence lives in block
`block_table[t // block_size]` at offset `t % block_size`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class OutOfBlocksError(Exception):
    """The pool has too few free blocks."""


class BlockPool:
    """The free list of a pool of blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Makes a pool with every block free.

        Args:
            num_blocks: Blocks in all, at least 1.
            block_size: Tokens per block, at least 1.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks off the free list.

        Args:
            num_blocks: How many.

        Returns:
            Their ids.

        Raises:
            OutOfBlocksError: If too few are free; then none is taken.
        """
        if num_blocks > len(self._free):
            raise OutOfBlocksError
        taken = self._free[len(self._free) - num_blocks :]
        del self._free[len(self._free) - num_blocks :]
        return taken[::-1]

    def free(self, block_ids: Iterable[int]) -> None:
        """Puts blocks back, so that the ones freed last are taken next."""
        self._free.extend(block_ids)

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Checks that every block is either free or in exactly one block table.

        Args:
            block_tables: The block tables of all sequences.

        Raises:
            AssertionError: Naming the blocks that are lost or held twice.
        """
        holders = Counter(self._free)
        for block_table in block_tables:
            holders.update(block_table)
        wrong = {block: holders[block] for block in range(self.num_blocks) if holders[block] != 1}
        assert not wrong, f"blocks held other than once: {wrong}"
        assert holders.total() == self.num_blocks, "blocks that are not in the pool are held"


class SequenceKV:
    """The KV of one sequence: its block table and how far it is computed.

    `num_computed_tokens` counts from the first token; slots beyond it hold
    nothing of value.
    """

    __slots__ = ("_pool", "block_table", "num_computed_tokens")

    def __init__(self, pool: BlockPool) -> None:
        """Starts without blocks."""
        self._pool = pool
        self.block_table: list[int] = []
        self.num_computed_tokens = 0

    def num_missing_blocks(self, num_tokens: int) -> int:
        """Blocks to allocate before `num_tokens` tokens fit."""
        return max(0, self._pool.num_blocks_for(num_tokens) - len(self.block_table))

    def grow(self, num_tokens: int) -> None:
        """Allocates blocks.

        Args:
            num_tokens: Tokens that fit afterwards.

        Raises:
            OutOfBlocksError: If the pool has too few; then nothing changes.
        """
        self.block_table += self._pool.allocate(self.num_missing_blocks(num_tokens))

    def rollback(self, num_tokens: int) -> None:
        """Keeps the KV of the first `num_tokens` tokens at most; frees the rest.

        Args:
            num_tokens: Absolute length, at least 0; 0 keeps nothing.
        """
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)
        num_kept = self._pool.num_blocks_for(self.num_computed_tokens)
        self._pool.free(reversed(self.block_table[num_kept:]))
        del self.block_table[num_kept:]

    def release(self) -> list[int]:
        """Frees every block.

        Returns:
            The blocks that were held.
        """
        held = list(self.block_table)
        self.rollback(0)
        return held
