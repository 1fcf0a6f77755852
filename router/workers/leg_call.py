"""A leg under way on a worker: what the registry needs to end it when the worker is lost.

A call that the router itself cancels wakes its reader at once, so a stream leaves a silent worker
without a timer of its own and without any cost per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from kvrelay.errors import KvrelayError


class CancellableCall(Protocol):
    """What a stay needs of its gRPC call."""

    def cancel(self) -> bool: ...


class LegCall:
    """One leg. ``tokens`` is its work, as the policy says; ``evicted`` why it was ended here.

    ``positions`` is all that its request can ever need, wherever it goes on.
    """

    def __init__(self, tokens: int, positions: int, connected: bool) -> None:
        self.tokens = tokens
        self.positions = positions
        self.connected = connected  # else a failure says nothing about this request
        self.evicted: KvrelayError | None = None
        self._call: CancellableCall | None = None

    def begin(self, call: CancellableCall) -> None:
        """``call`` carries the leg; it ends at once if the worker was lost meanwhile."""
        self._call = call
        if self.evicted is not None:
            call.cancel()

    def evict(self, error: KvrelayError) -> None:
        """End the leg: its reader gets ``error``."""
        self.evicted = self.evicted or error
        if self._call is not None:
            self._call.cancel()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turns the cancellation of an evicted call into the reason; others pass."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.evicted is None or (task is not None and task.cancelling()):
                raise
            raise self.evicted from None
