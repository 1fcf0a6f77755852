"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A counter-based generator without state: the number is a function of (seed, position), so a request
draws the same numbers on any worker.
"""

from __future__ import annotations

MASK = 0xFFFFFFFF
MULTIPLY = (0xD2511F53, 0xCD9E8D57)
BUMP = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

Counter = tuple[int, int, int, int]


def philox(counter: Counter, key: tuple[int, int]) -> Counter:
    """Four random 32-bit words from a counter of four and a key of two."""
    a, b, c, d = counter
    left, right = key
    for _ in range(ROUNDS):
        first, second = MULTIPLY[0] * a, MULTIPLY[1] * c
        a, b, c, d = (
            (second >> 32) ^ b ^ left,
            second & MASK,
            (first >> 32) ^ d ^ right,
            first & MASK,
        )
        left, right = (left + BUMP[0]) & MASK, (right + BUMP[1]) & MASK
    return a, b, c, d


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53, for the token at ``position`` of a sequence.

    ``seed`` and ``position`` are unsigned 64-bit numbers; larger ones raise ``ValueError``.
    """
    if not (0 <= seed < 1 << 64 and 0 <= position < 1 << 64):
        raise ValueError(f"seed and position must fit in 64 unsigned bits: {seed}, {position}")
    counter = (position & MASK, position >> 32, 0, 0)
    high, low, _, _ = philox(counter, (seed & MASK, seed >> 32))
    return ((high << 32 | low) >> 11) * 2.0**-53
