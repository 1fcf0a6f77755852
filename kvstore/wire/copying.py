"""Copies between segments and pools, without holding up the other threads of the process.

Hashing what was just copied is nearly free while it lies in the CPU's cache, so both are done a
piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from kvrelay.block.header import checksum

LARGE = 128 << 10
"""From here on a copy takes longer than calling numpy, which lets other threads run meanwhile."""

HASH_CHUNK = 512 << 10
"""Copied and then hashed: both sides of it lie in a second level of cache of 1 MiB or more."""

Receive = Callable[[Sequence[memoryview]], None]
"""Fills all of some buffers with what comes next."""


def copy(target: memoryview, source: memoryview) -> None:
    """Copy as many bytes as both have; ``ValueError`` if they differ in length."""
    if len(source) < LARGE:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def copy_summed(target: memoryview, source: memoryview) -> int:
    """The same, and the checksum of what then lies in ``target``."""
    if len(source) <= HASH_CHUNK:
        copy(target, source)
        return checksum(target)
    hasher = xxhash.xxh3_64()
    for start in range(0, len(source), HASH_CHUNK):
        piece = target[start : start + HASH_CHUNK]
        copy(piece, source[start : start + HASH_CHUNK])
        hasher.update(piece)
    return hasher.intdigest()


def receive_summed(receive: Receive, header: memoryview, payload: memoryview) -> int:
    """Both, as they come, and the checksum of ``payload``."""
    hasher = xxhash.xxh3_64()
    piece = payload[:HASH_CHUNK]
    receive([header, piece])
    hasher.update(piece)
    for start in range(HASH_CHUNK, len(payload), HASH_CHUNK):
        piece = payload[start : start + HASH_CHUNK]
        receive([piece])
        hasher.update(piece)
    return hasher.intdigest()
