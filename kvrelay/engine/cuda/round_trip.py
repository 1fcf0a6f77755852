"""Blocks of a pool to shared memory and back, as the transport of a store on this host takes them.

A save is copied into a window, which the device writes; the store copies it to its arena, which a
worker can only read; a load is copied out of that. Both are registered with the driver.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Sequence

from kvrelay.engine.cuda.copies import BlockCopies

SECONDS = 20.0
"""How long the driver may take to register a few blocks."""

_SEALS = 1 | 2 | 4 | 16  # of the store's arena: no more seals, no other size, no new writer
_ADD_SEALS = 1033


class RoundTrip:
    """Memory for ``blocks`` blocks each way; leaving the ``with`` unregisters it."""

    def __init__(self, copies: BlockCopies, blocks: int) -> None:
        self._copies = copies
        self._window = mmap.mmap(-1, blocks * copies.block_bytes)
        stored, arena = _arena(blocks * copies.block_bytes)
        self._stored = stored
        self._arena = arena
        self._mappings = {"window": self._window, "arena": self._arena}

    def __enter__(self) -> RoundTrip:
        registered = self._copies.registered
        registered.register(self._window, writable=True)
        registered.register(self._arena, writable=False)
        return self

    def __exit__(self, *error: object) -> None:
        for memory in self._mappings.values():
            self._copies.registered.unregister(memory)

    def refusals(self) -> dict[str, str]:
        """Why the driver does not register the window, or the arena; waits for its answers."""
        found = {
            name: self._copies.registered.refusal(memory, SECONDS)
            for name, memory in self._mappings.items()
        }
        return {name: why for name, why in found.items() if why is not None}

    def save(self, blocks: Sequence[int], step: Callable[[], object]) -> None:
        """Copy blocks to the window, or to pinned memory, and then to the arena.

        ``step`` launches work of the device before each copy.
        """
        size, count = self._copies.block_bytes, self._copies.positions
        window, stored = memoryview(self._window), memoryview(self._stored)
        with self._copies.saving() as batch:
            made = []
            for number, block in enumerate(blocks):
                step()
                made.append(batch.save(block, count, window[number * size :][:size]))
            batch.settle()
            for number, copied in enumerate(made):
                assert copied is not None, "no slot is free"
                stored[number * size :][:size] = copied.payload

    def load(self, blocks: Sequence[int], step: Callable[[], object]) -> None:
        """Copy to blocks what ``save`` has stored, out of the arena or through pinned memory."""
        size, count = self._copies.block_bytes, self._copies.positions
        arena = memoryview(self._arena)
        with self._copies.loading() as batch:
            for number, block in enumerate(blocks):
                step()
                payload = arena[number * size :][:size]
                if not batch.load(block, count, payload):
                    slot = batch.slot()
                    assert slot is not None, "no slot is free"
                    slot[:] = payload
                    batch.load(block, count, slot)


def _arena(size: int) -> tuple[mmap.mmap, mmap.mmap]:
    """The store's mapping of its arena, and that of a reader; ``RuntimeError`` without any."""
    if sys.platform != "linux":
        raise RuntimeError("memory is shared with a store only on Linux")
    try:
        fd = os.memfd_create("kvrelay-self-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            stored = mmap.mmap(fd, size)
            fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
            return stored, mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
    except OSError as error:
        raise RuntimeError(f"no memory can be shared with a store: {error}") from error
