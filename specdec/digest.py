"""Digest of a token sequence, kept while it grows and shrinks.

A chain of block hashes, hash i = H(hash i-1, block i), ends in a hash of the
tokens after the last full block. Two services that agree on the digest agree
on every token before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_BLOCK_TOKENS = 16
_DIGEST_BYTES = 16


class PrefixDigest:
    """Digests prefixes of one growing list of token ids."""

    def __init__(self, salt: bytes = b"") -> None:
        """Starts with no tokens.

        Args:
            salt: Mixed in first; sequences with different salts never agree.
        """
        self._chain = [blake2b(salt, digest_size=_DIGEST_BYTES, person=b"specdec.prefix").digest()]
        self._last = (-1, b"")
        """The last answer; both services of a round ask for the same length."""

    def digest(self, token_ids: Sequence[int], length: int) -> bytes:
        """Digests the first tokens.

        Args:
            token_ids: The list; it may differ from an earlier call's only
                beyond a length given to `rollback` since.
            length: How many tokens count.

        Returns:
            16 bytes.
        """
        if self._last[0] == length:
            return self._last[1]
        num_full = length // _BLOCK_TOKENS
        while len(self._chain) <= num_full:
            start = (len(self._chain) - 1) * _BLOCK_TOKENS
            block = token_ids[start : start + _BLOCK_TOKENS]
            self._chain.append(_hash(self._chain[-1], block))
        digest = _hash(self._chain[num_full], token_ids[num_full * _BLOCK_TOKENS : length])
        self._last = (length, digest)
        return digest

    def block_hashes(self, token_ids: Sequence[int], length: int) -> list[bytes]:
        """Chained hashes of the full blocks of 16 tokens.

        Args:
            token_ids: As for `digest`.
            length: How many tokens count.

        Returns:
            One per full block; equal ones stand for equal tokens from the first on.
        """
        self.digest(token_ids, length)
        return self._chain[1 : length // _BLOCK_TOKENS + 1]

    def rollback(self, length: int) -> None:
        """Forgets the hashes of blocks that reach beyond `length` tokens."""
        del self._chain[length // _BLOCK_TOKENS + 1 :]
        if self._last[0] > length:
            self._last = (-1, b"")


def _hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    return blake2b(previous + array("I", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()
