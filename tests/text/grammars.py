"""Random walks through a grammar."""

from __future__ import annotations

import random

from kvrelay.text.structured import TokenGrammar


def bits(mask: bytes) -> list[int]:
    return [8 * at + bit for at, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]


def walk(made: TokenGrammar, ending: int, seed: int, most: int = 200) -> list[int]:
    """A random output, ended as soon as it may be after some tokens."""
    chance = random.Random(seed)
    output: list[int] = []
    while len(output) < most:
        allowed = bits(made.allowed(output, 0, len(output)))
        rest = [token for token in allowed if token != ending]
        if ending in allowed and (not rest or chance.random() < 0.3):
            return output
        output.append(chance.choice(rest))
    return output
