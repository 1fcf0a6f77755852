"""What a transport and an accelerator need of each other to copy blocks without the CPU.

The transport registers the memory that it maps. The accelerator copies block by block while the
host goes on, and one ``settle`` waits for the copies of a batch.
"""

from __future__ import annotations

import mmap
from typing import Protocol


class MemoryRegistrar(Protocol):
    """Gives mapped memory to the driver of an accelerator. Calls return at once."""

    def register(self, memory: mmap.mmap, writable: bool) -> None:
        """Make copies to and from this mapping possible, if the driver agrees; keep it mapped."""

    def unregister(self, memory: mmap.mmap) -> None:
        """Begin no more copies with it, and give it back when the running ones have ended."""


class DeviceTarget(Protocol):
    """A wanted block in the memory of an accelerator."""

    def take(self, header: bytes, payload: memoryview) -> bool:
        """Start to copy the payload to the device, and verify the block meanwhile.

        ``False``, and nothing has been done, if the device cannot read this memory. Else the
        payload must stay as it is until ``settle`` has returned.
        """

    def settle(self) -> None:
        """Wait for every copy of the batch."""


class DeviceSource(Protocol):
    """An offered block in the memory of an accelerator."""

    def start(self, target: memoryview | None) -> bool:
        """Start to copy the payload out of the device, for the next ``Offer.read``.

        It goes to the end of ``target`` if the device can write there, else to pinned memory.
        ``False`` if there is no room for it.
        """

    def settle(self) -> None:
        """Wait for every copy of the batch."""

    def recycle(self) -> None:
        """Forget every copy of the batch: the blocks that were read are not needed any more."""
