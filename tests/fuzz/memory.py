"""Memory of each process of a cluster before, between and after floods, and what it may grow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvrelay.process.malloc import TRIM_SECONDS

FRAGMENTS_MIB = 24
"""Pages that stay resident because something small in them is in use."""
LEAK_BYTES = 512
"""For each message to a port: half of them are broken HTTP/2 connections, each of which costs gRPC
300 to 450 bytes for good (docs/failures.md)."""
AT_ONCE_MIB = 256
"""What a flood leaves until its threads have ended and the heap was trimmed."""
READ_SECONDS = 1.0
QUIET = round(TRIM_SECONDS) + 5  # readings: the heap is trimmed between the first and the last
MOST = 8 * QUIET

Memory = Mapping[str, int]
"""MiB of each process."""


async def at_rest(read: Callable[[], Memory], seconds: float = READ_SECONDS) -> Memory:
    """The least of each process, read until ``QUIET`` readings in a row show nothing less.

    A process gives memory back when the threads of a flood have ended, and each time that it trims
    its heap, which on a busy machine is late.
    """
    least, quiet = read(), 0
    for _ in range(MOST):
        if quiet == QUIET:
            break
        await asyncio.sleep(seconds)
        now = read()
        quiet = 0 if any(now[name] < mib for name, mib in least.items()) else quiet + 1
        least = {name: min(now[name], mib) for name, mib in least.items()}
    return least


def allowed_mib(messages: int) -> int:
    """What a process may grow in so many messages to each port, once its caches are full."""
    return FRAGMENTS_MIB + (LEAK_BYTES * messages >> 20)


@dataclass(frozen=True, slots=True)
class Readings:
    """Memory at the start, after half of the messages and at the end.

    The first half fills what is bounded: the store's bookkeeping, the kernels of oneDNN, the heap
    that a flood needs. So the second half shows what is not.
    """

    start: Memory
    half: Memory
    end: Memory

    def table(self) -> str:
        rows = [f"{'MiB':<12}{'start':>8}{'half':>8}{'end':>8}"]
        for name, mib in self.start.items():
            rows.append(f"{name:<12}{mib:>8}{self.half[name]:>8}{self.end[name]:>8}")
        return "\n".join(rows)

    def problems(self, allowed: int) -> list[str]:
        """The processes that grew by more than ``allowed`` MiB in the second half."""
        grown = {name: self.end[name] - mib for name, mib in self.half.items()}
        return [
            f"{name}: its memory grew by {mib} MiB in the second half, {allowed} are allowed"
            for name, mib in grown.items()
            if mib > allowed
        ]
