"""Copies between shared memory and pools that release the GIL, with checksums on the way.

Hashing is nearly free while the copied bytes are in the CPU's cache: both go chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from kvrelay.block.header import checksum

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


def copy_summed(target: memoryview, source: memoryview) -> int:
    """Copy, and the checksum of ``target`` after it."""
    if len(source) <= HASH_CHUNK:
        copy(target, source)
        return checksum(target)
    hasher = xxhash.xxh3_64()
    for start in range(0, len(source), HASH_CHUNK):
        chunk = target[start : start + HASH_CHUNK]
        copy(chunk, source[start : start + HASH_CHUNK])
        hasher.update(chunk)
    return hasher.intdigest()


def receive_block(
    receive: Receive, header: memoryview, payload: memoryview, summed: bool
) -> int | None:
    """Receive header and payload; the checksum of ``payload`` if it is to be ``summed``."""
    hasher = xxhash.xxh3_64() if summed else None
    chunk = payload[:HASH_CHUNK]
    receive([header, chunk])
    for start in range(HASH_CHUNK, len(payload), HASH_CHUNK):
        if hasher is not None:
            hasher.update(chunk)
        chunk = payload[start : start + HASH_CHUNK]
        receive([chunk])
    if hasher is None:
        return None
    hasher.update(chunk)
    return hasher.intdigest()
