"""Copies between shared memory and pools that release the GIL, with checksums on the way.

Hashing is nearly free while the copied bytes are in the CPU's cache: both go chunk by chunk. A
chunk is a part of a head or several heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from kvrelay.block.header import checksums

LARGE = 128 << 10
"""From this size on a copy takes longer than the call of numpy, which releases the GIL."""

HASH_CHUNK = 512 << 10
"""Copied and then hashed: source and target fit into a second level cache of 1 MiB."""

Receive = Callable[[Sequence[memoryview]], None]
"""Fills buffers with the next bytes of a connection."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy all of ``source``; ``ValueError`` if the lengths differ."""
    if len(source) < LARGE:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def copy_summed(target: memoryview, source: memoryview, heads: int) -> tuple[int, ...]:
    """Copy, and the checksums of the ``heads`` heads of ``target`` after it."""
    if len(source) != len(target):
        raise ValueError(f"{len(source)} bytes do not fill {len(target)}")
    return _filled(target, heads, lambda part: copy(target[part], source[part]))


def receive_block(
    receive: Receive, header: memoryview, payload: memoryview, heads: int
) -> tuple[int, ...] | None:
    """Receive header and payload; the checksums of its heads, unless ``heads`` is 0."""
    before = [header]

    def fill(part: slice) -> None:
        receive([*before, payload[part]])
        before.clear()

    summed = _filled(payload, heads or 1, fill, bool(heads))
    return summed if heads else None


def _filled(
    target: memoryview, heads: int, fill: Callable[[slice], None], summed: bool = True
) -> tuple[int, ...]:
    """``fill`` each part of at most ``HASH_CHUNK`` in order; the checksums of the heads."""
    size = -(-len(target) // heads)
    together = HASH_CHUNK // max(size, 1)
    if not together:
        return tuple(
            _fill_head(target, start, min(start + size, len(target)), fill, summed)
            for start in range(0, len(target), size)
        )
    found: list[int] = []
    for first in range(0, heads, together):
        count = min(together, heads - first)
        part = slice(first * size, (first + count) * size)
        fill(part)
        if summed:
            found += checksums(target[part], count)
    return tuple(found)


def _fill_head(
    target: memoryview, start: int, end: int, fill: Callable[[slice], None], summed: bool
) -> int:
    hasher = xxhash.xxh3_64()
    for begin in range(start, end, HASH_CHUNK):
        part = slice(begin, min(begin + HASH_CHUNK, end))
        fill(part)
        if summed:
            hasher.update(target[part])
    return hasher.intdigest()
