"""Fixed-size blocks of KV memory: who holds them, and whose content is known.

A block has room for `block_size` tokens. Token t of a sequence lives in block
`block_table[t // block_size]` at offset `t % block_size`.

The prefix cache: a full block may be cached under the hash of all tokens up to
its end. A cached block stays in memory when its last holder lets it go, until
the room is needed, and other sequences with the same tokens may hold it too.
Holders read it; whoever must write into a block that is cached, or held by
others, copies it first.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from hashlib import blake2b


class OutOfBlocksError(Exception):
    """The pool has too few free blocks."""


class CachedBlock:
    """A block whose tokens, and all tokens before them, are known.

    Hashes find it; equal content, block by block, is what makes it fit. So a
    collision costs a miss, never a wrong prefix.
    """

    __slots__ = ("block_hash", "block_id", "children", "content", "parent")

    def __init__(
        self, block_id: int, parent: CachedBlock | None, block_hash: bytes, content: bytes
    ) -> None:
        self.block_id = block_id
        """-1 in a root, which stands for no tokens."""
        self.parent = parent
        self.block_hash = block_hash
        self.content = content
        """Its token ids, as bytes; a root's is the salt."""
        self.children: dict[bytes, CachedBlock] = {}
        """Cached blocks right after it, by hash."""


class BlockPool:
    """Who holds each block, and which are cached."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        copy_block: Callable[[int, int], None] = lambda _source, _target: None,
        keeps_prefixes: bool = True,
        hash_bytes: int = 16,
    ) -> None:
        """Makes a pool with every block free.

        Args:
            num_blocks: Blocks in all, at least 1.
            block_size: Tokens per block, at least 1.
            copy_block: Copies the memory of one block to another.
            keeps_prefixes: Whether blocks are ever cached.
            hash_bytes: Bytes of a block's hash, 1 to 64.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.copy_block = copy_block
        self._keeps_prefixes = keeps_prefixes
        self._hash_bytes = hash_bytes
        self._free = list(range(num_blocks - 1, -1, -1))
        self._num_holders = [0] * num_blocks
        self._roots: dict[bytes, CachedBlock] = {}
        self._cached: dict[int, CachedBlock] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that nobody holds, the least recently used first."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; the cached ones among them are given up when needed."""
        return len(self._free) + len(self._idle)

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix cache."""
        return len(self._cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks that nobody holds; cached ones last, the least recently used first.

        Args:
            num_blocks: How many.

        Returns:
            Their ids.

        Raises:
            OutOfBlocksError: If too few are free; then none is taken.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocksError
        while len(self._free) < num_blocks:
            self.forget(next(iter(self._idle)))
        taken = self._free[len(self._free) - num_blocks :]
        del self._free[len(self._free) - num_blocks :]
        for block_id in taken:
            self._num_holders[block_id] = 1
        return taken[::-1]

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a holder to blocks that are held or cached."""
        for block_id in block_ids:
            self._num_holders[block_id] += 1
            self._idle.pop(block_id, None)

    def free(self, block_ids: Iterable[int]) -> list[int]:
        """Takes a holder off each block.

        Args:
            block_ids: Held ones. Those freed last are taken next, or, if they are
                cached, given up last: a sequence frees its end first.

        Returns:
            Those that nobody holds now and whose content is lost.
        """
        lost = []
        for block_id in block_ids:
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id]:
                continue
            if block_id in self._cached:
                self._idle[block_id] = None
            else:
                self._free.append(block_id)
                lost.append(block_id)
        return lost

    def is_writable(self, block_id: int) -> bool:
        """Whether its holder may write into it: the only one, of a block that is not cached."""
        return self._num_holders[block_id] == 1 and block_id not in self._cached

    # The prefix cache.

    def root(self, salt: bytes) -> CachedBlock:
        """Where the prefixes of a salt begin; to be asked for anew each time."""
        return self._roots.get(salt) or CachedBlock(-1, None, self._hash(b"", salt), salt)

    def is_cached(self, block: CachedBlock) -> bool:
        """Whether a block is still known; so are those before it then."""
        return self._cached.get(block.block_id) is block

    def find(self, parent: CachedBlock, token_ids: Seq[int]) -> CachedBlock | None:
        """Looks for the cached block with these tokens right after a prefix.

        Args:
            parent: The prefix.
            token_ids: [block_size] ids.

        Returns:
            The block, or None.
        """
        content = _to_bytes(token_ids)
        found = parent.children.get(self._hash(parent.block_hash, content))
        return found if found is not None and found.content == content else None

    def cache(self, parent: CachedBlock, token_ids: Seq[int], block_id: int) -> CachedBlock | None:
        """Makes a held block known, unless one with the same tokens is.

        Args:
            parent: The prefix; cached, or a root.
            token_ids: [block_size] ids of the block's tokens.
            block_id: The block; all its KV is computed, and no token will be taken back.

        Returns:
            The cached block with these tokens, maybe another one; None if its hash is taken,
            or nothing is cached here.
        """
        if not self._keeps_prefixes:
            return None
        content = _to_bytes(token_ids)
        block_hash = self._hash(parent.block_hash, content)
        found = parent.children.get(block_hash)
        if found is not None:
            return found if found.content == content else None
        assert block_id not in self._cached
        if parent.parent is None:
            self._roots[parent.content] = parent
        else:
            assert self.is_cached(parent)
        block = CachedBlock(block_id, parent, block_hash, content)
        parent.children[block_hash] = block
        self._cached[block_id] = block
        return block

    def forget(self, block_id: int) -> None:
        """Takes a block out of the cache, and all that follow it: nothing leads to them now."""
        first = self._cached.get(block_id)
        if first is None:
            return
        parent = first.parent
        assert parent is not None
        del parent.children[first.block_hash]
        if parent.parent is None and not parent.children:
            del self._roots[parent.content]
        waiting = [first]
        while waiting:
            block = waiting.pop()
            waiting += block.children.values()
            block.children = {}
            del self._cached[block.block_id]
            if block.block_id in self._idle:
                del self._idle[block.block_id]
                self._free.append(block.block_id)

    def _hash(self, previous: bytes, content: bytes) -> bytes:
        return blake2b(
            previous + content, digest_size=self._hash_bytes, person=b"specdec.block"
        ).digest()

    def check_integrity(self, block_tables: Iterable[list[int]]) -> None:
        """Checks that what the pool believes of every block is true.

        Args:
            block_tables: The block tables of all sequences.

        Raises:
            AssertionError: Naming the blocks that are lost, or not held as counted.
        """
        holders: Counter[int] = Counter()
        for block_table in block_tables:
            holders.update(block_table)
        wrong = {
            block_id: (holders[block_id], count)
            for block_id, count in enumerate(self._num_holders)
            if holders[block_id] != count
        }
        assert not wrong, f"blocks whose holders are not as counted: {wrong}"
        assert holders.keys() <= set(range(self.num_blocks)), "unknown blocks are held"
        kept = Counter([*self._free, *self._idle, *holders.keys()])
        assert set(kept) == set(range(self.num_blocks)), "blocks are lost"
        assert kept.total() == self.num_blocks, "blocks are held and free at once"
        assert self._idle.keys() <= self._cached.keys(), "idle blocks are not cached"
        for block_id, block in self._cached.items():
            parent = block.parent
            assert block.block_id == block_id
            assert parent is not None
            assert parent.children[block.block_hash] is block, "cached blocks out of reach"
            known = self._cached.get(parent.block_id) or self._roots.get(parent.content)
            assert known is parent, "prefixes out of reach"


def _to_bytes(token_ids: Seq[int]) -> bytes:
    return array("I", token_ids).tobytes()
