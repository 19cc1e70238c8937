"""Counter-based randomness.

Every random number is a pure function of (subkey, absolute position, index),
so that a repeated, reordered, re-batched or failed-over round draws the same
numbers, and no generator state exists that requests could share.

The function is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", SC 2011). Its 64-bit key is a subkey derived per (seed, choice,
purpose); its 128-bit counter is (index // 4, position low, position high, 0),
and number `index` is word `index % 4` of the block. `index` is the token id
where one number per token is needed, else 0.

Words are 32 bits: an event of probability below 2^-32 is not resolved.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from enum import IntEnum

import torch

from specdec.types import SamplingKeys

# Shapes: n = rows, V = vocabulary size.

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
# Below this many numbers plain Python beats the fixed cost of ~100 tensor operations.
_SCALAR_LIMIT = 12


class Purpose(IntEnum):
    """What a random number decides; each purpose has its own subkey."""

    PROPOSE = 1
    ACCEPT = 2
    RESIDUAL = 3
    TARGET = 4


def fresh_seed() -> int:
    """Returns a seed of 64 bits from the operating system's entropy."""
    return secrets.randbits(64)


def derive_keys(seed: int, choice: int) -> SamplingKeys:
    """Derives the subkeys of one choice.

    Args:
        seed: The request's seed, in [0, 2^64).
        choice: Which of the n choices, from 0.

    Returns:
        One subkey per purpose; a subkey tells nothing about the seed or the
        other subkeys.
    """
    propose, accept, residual, target = (_derive(seed, choice, purpose) for purpose in Purpose)
    return SamplingKeys(propose=propose, accept=accept, residual=residual, target=target)


def _derive(seed: int, choice: int, purpose: Purpose) -> int:
    # The last counter word is non-zero here and zero in every draw, so that a
    # derivation never meets a draw of the same key.
    words = _philox_scalar((choice & _MASK, choice >> 32, 0, purpose), seed)
    return words[0] | words[1] << 32


def uniform_probs(keys: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Draws one uniform number per row.

    Args:
        keys: [n] subkeys, 64 bits each.
        positions: [n] absolute positions, in tokens.

    Returns:
        [n] float64 on the CPU, in [0, 1), multiples of 2^-32.
    """
    if len(keys) <= _SCALAR_LIMIT:
        return torch.tensor(
            [uniform_prob(key, position) for key, position in zip(keys, positions, strict=True)],
            dtype=torch.float64,
        )
    blocks = torch.zeros((len(keys), 1), dtype=torch.int64)
    words = _philox(blocks, keys, positions)
    return words[0].flatten().double() * 2.0**-32


def uniform_prob(key: int, position: int) -> float:
    """Draws one uniform number: one row of `uniform_probs`."""
    word = _philox_scalar((0, position & _MASK, position >> 32, 0), key)[0]
    return word * 2.0**-32


def exponential_noise(
    keys: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Draws standard exponential noise for every token.

    The token with the largest weight / noise is a draw from the weights (the
    exponential race); -log(noise) is Gumbel noise.

    Args:
        keys: [n] subkeys.
        positions: [n] absolute positions.
        vocab_size: V; the noise of a token does not depend on it.
        device: Where to compute.

    Returns:
        [n, V] float64, positive.
    """
    blocks = torch.arange((vocab_size + 3) // 4, device=device).expand(len(keys), -1)
    words = torch.stack(_philox(blocks, keys, positions), dim=-1)  # [n, ceil(V / 4), 4]
    return _exponential(words.flatten(1)[:, :vocab_size])


def exponential_noise_at(
    keys: Sequence[int],
    positions: Sequence[int],
    rows: torch.Tensor,
    token_ids: torch.Tensor,
) -> torch.Tensor:
    """Draws entries of `exponential_noise`.

    Args:
        keys: [n] subkeys.
        positions: [n] absolute positions.
        rows: [m] int64 row of each entry.
        token_ids: [m] int64 token of each entry.

    Returns:
        [m] float64, positive.
    """
    words = _philox((token_ids >> 2)[:, None], keys, positions, rows)
    chosen = torch.cat(words, dim=1).gather(1, (token_ids & 3)[:, None])  # [m, 1]
    return _exponential(chosen[:, 0])


def _exponential(words: torch.Tensor) -> torch.Tensor:
    # Float64: in float32, words near 2^32 would round to a uniform of 1 and a noise of 0.
    return words.double().add_(0.5).mul_(2.0**-32).log_().neg_()


def _philox(
    blocks: torch.Tensor,
    keys: Sequence[int],
    positions: Sequence[int],
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Runs Philox4x32-10 on counters (block, position, 0).

    Args:
        blocks: [n, b] int64 first counter word.
        keys: [k] subkeys.
        positions: [k] absolute positions.
        rows: [n] which key and position each row of blocks uses; None: k = n.

    Returns:
        Four tensors [n, b], int64 in [0, 2^32).
    """
    device = blocks.device
    parts = torch.tensor(
        [[key & _MASK, key >> 32, pos & _MASK, pos >> 32]
         for key, pos in zip(keys, positions, strict=True)],
        dtype=torch.int64,
    ).to(device)  # fmt: skip
    if rows is not None:
        parts = parts[rows]
    key0, key1 = parts[:, 0:1], parts[:, 1:2]  # [n, 1]
    x0, x1, x2 = blocks, parts[:, 2:3], parts[:, 3:4]
    x3 = torch.zeros((1, 1), dtype=torch.int64, device=device)
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, which keeps all 64 bits; the shift is
        # arithmetic, so the high word is masked.
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((product1 >> 32) & _MASK) ^ x1 ^ key0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ x3 ^ key1,
            product0 & _MASK,
        )
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    shape = blocks.shape
    return tuple(word.expand(shape) for word in (x0, x1, x2, x3))


def _philox_scalar(counter: tuple[int, int, int, int], key: int) -> tuple[int, int, int, int]:
    """Runs Philox4x32-10 on one counter."""
    x0, x1, x2, x3 = counter
    key0, key1 = key & _MASK, key >> 32
    for _ in range(_ROUNDS):
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            (product1 >> 32) ^ x1 ^ key0,
            product1 & _MASK,
            (product0 >> 32) ^ x3 ^ key1,
            product0 & _MASK,
        )
        key0, key1 = (key0 + _WEYL[0]) & _MASK, (key1 + _WEYL[1]) & _MASK
    return x0, x1, x2, x3
