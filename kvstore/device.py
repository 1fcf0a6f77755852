"""The interface between a transport and an accelerator that copies blocks by DMA.

The transport registers the memory that it maps. Copies are started one by one and run in the
background; ``settle`` waits for those of a batch.
"""

from __future__ import annotations

import mmap
from typing import Protocol


class MemoryRegistrar(Protocol):
    """Registers mapped memory with an accelerator's driver. Calls return at once."""

    def register(self, memory: mmap.mmap, writable: bool) -> None:
        """Allow copies to and from this mapping, if the driver agrees; it must stay mapped."""

    def unregister(self, memory: mmap.mmap) -> None:
        """Start no more copies with it, and unregister it when the running ones have ended."""


class DeviceTarget(Protocol):
    """A wanted block in the memory of an accelerator."""

    def take(self, header: bytes, payload: memoryview) -> bool:
        """Start to copy the payload to the device, and verify the block meanwhile.

        Returns ``False``, having done nothing, if the device cannot read this memory. Otherwise the
        payload must not change until ``settle`` has returned.
        """

    def settle(self) -> None:
        """Wait for every copy of the batch."""


class DeviceSource(Protocol):
    """An offered block in the memory of an accelerator."""

    def start(self, target: memoryview | None) -> bool:
        """Start to copy the payload out of the device, for the next ``Offer.read``.

        The target is the end of ``target`` if the device can write there, else pinned memory.
        Returns ``False`` if no pinned memory is free.
        """

    def settle(self) -> None:
        """Wait for every copy of the batch."""

    def recycle(self) -> None:
        """Free the pinned memory of the batch: the blocks that were read are no longer needed."""
