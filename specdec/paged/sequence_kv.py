"""The KV of one sequence: which blocks, computed how far, shared with whom."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specdec.paged.block_pool import BlockPool, CachedBlock


class SequenceKV:
    """A block table, and how far it is computed.

    `num_computed_tokens` counts from the first token; slots beyond it hold
    nothing of value.

    Attributes:
        block_table: Block ids, in the tokens' order.
        num_computed_tokens: Tokens whose KV is computed.
        salt: Only sequences of the same salt share blocks.
        is_proven: Whether logits that depend on all of the KV were finite. What is
            not proven is never cached, and cleared when it is freed.
    """

    __slots__ = ("_pool", "_prefix", "block_table", "is_proven", "num_computed_tokens", "salt")

    def __init__(self, pool: BlockPool, salt: bytes = b"") -> None:
        """Starts without blocks.

        Args:
            pool: Where blocks come from.
            salt: Only sequences of the same salt share blocks.
        """
        self._pool = pool
        self.salt = salt
        self._prefix: list[CachedBlock] = []
        """Cached blocks with this sequence's leading tokens; not always its own blocks."""
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.is_proven = True

    # Sharing.

    def reuse(self, token_ids: Seq[int], num_tokens: int) -> None:
        """Takes over what the cache knows of the sequence's prefix; it must hold no blocks.

        Args:
            token_ids: Its tokens.
            num_tokens: Tokens whose KV is of use, at most all of them. The last
                block may reach beyond: writing there copies it.
        """
        assert not self.block_table
        size = self._pool.block_size
        for start in range(0, num_tokens, size):
            tokens = token_ids[start : start + size]
            found = self._pool.find(self._last_cached(), tokens) if len(tokens) == size else None
            if found is None:
                break
            self._prefix.append(found)
        self.block_table = [block.block_id for block in self._prefix]
        self._pool.share(self.block_table)
        self.num_computed_tokens = min(num_tokens, len(self.block_table) * size)
        del self._prefix[self.num_computed_tokens // size :]

    def remember(self, token_ids: Seq[int], num_retained: int) -> None:
        """Puts full blocks into the cache, if what they hold is proven.

        Args:
            token_ids: The sequence's tokens.
            num_retained: Tokens that will not be taken back.
        """
        if not self.is_proven:
            return
        size = self._pool.block_size
        num_full = min(self.num_computed_tokens, num_retained) // size
        if len(self._prefix) >= num_full:
            return
        while self._prefix and not self._pool.is_cached(self._prefix[-1]):
            self._prefix.pop()  # another sequence's block, given up since
        for index in range(len(self._prefix), num_full):
            tokens = token_ids[index * size : (index + 1) * size]
            block = self._pool.cache(self._last_cached(), tokens, self.block_table[index])
            if block is None:
                break
            self._prefix.append(block)

    def fork(self, num_tokens: int) -> SequenceKV:
        """Makes a sequence that shares the first tokens.

        Args:
            num_tokens: How many, at most those computed.

        Returns:
            It; both go on by themselves.
        """
        assert num_tokens <= self.num_computed_tokens
        child = SequenceKV(self._pool, self.salt)
        child.block_table = self.block_table[: self._pool.num_blocks_for(num_tokens)]
        self._pool.share(child.block_table)
        child.num_computed_tokens = num_tokens
        child._prefix = self._prefix[: num_tokens // self._pool.block_size]
        child.is_proven = self.is_proven
        return child

    def _last_cached(self) -> CachedBlock:
        return self._prefix[-1] if self._prefix else self._pool.root(self.salt)

    # Growing and shrinking.

    def num_missing_blocks(self, num_tokens: int) -> int:
        """Blocks to allocate before the KV up to `num_tokens` tokens can be written."""
        missing = self._pool.num_blocks_for(num_tokens) - len(self.block_table)
        return max(0, missing) + (self._shared_index() is not None)

    def grow(self, num_tokens: int) -> None:
        """Makes room to write the KV after the computed tokens, up to `num_tokens`.

        Args:
            num_tokens: Tokens that fit afterwards, more than are computed.

        Raises:
            OutOfBlocksError: If the pool has too few blocks; then nothing changes.
        """
        shared = self._shared_index()
        taken = self._pool.allocate(self.num_missing_blocks(num_tokens))
        if shared is not None:
            source, copy = self.block_table[shared], taken.pop()
            self._pool.copy_block(source, copy)
            self.block_table[shared] = copy
            self._pool.free([source])
        self.block_table += taken

    def _shared_index(self) -> int | None:
        """Index of the block that the next token is written to, if it must be copied first."""
        index = self.num_computed_tokens // self._pool.block_size
        if index < len(self.block_table) and not self._pool.is_writable(self.block_table[index]):
            return index
        return None

    def rollback(self, num_tokens: int) -> list[int]:
        """Keeps the KV of the first `num_tokens` tokens at most; frees the rest.

        Args:
            num_tokens: Absolute length, at least 0; 0 keeps nothing.

        Returns:
            The blocks whose content is lost.
        """
        self.num_computed_tokens = min(self.num_computed_tokens, num_tokens)
        num_kept = self._pool.num_blocks_for(self.num_computed_tokens)
        lost = self._pool.free(reversed(self.block_table[num_kept:]))
        del self.block_table[num_kept:]
        del self._prefix[self.num_computed_tokens // self._pool.block_size :]
        return lost

    def release(self) -> list[int]:
        """Frees every block.

        Returns:
            The blocks to be cleared before another sequence reads them: masked
            reads would spread a NaN.
        """
        lost = self.rollback(0)
        is_proven, self.is_proven = self.is_proven, True
        return [] if is_proven else lost

    def discard(self) -> list[int]:
        """Frees every block, and lets no one reuse them: their content is in doubt.

        Returns:
            The blocks to be cleared; as `release`.
        """
        for block_id in self.block_table:
            self._pool.forget(block_id)
        self.is_proven = False
        return self.release()
