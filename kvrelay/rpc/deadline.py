"""One frozen point in time that is passed down a call, in place of timeouts that add up.

Made once at the edge, from the client's deadline bounded by the server's; every wait below uses
``remaining()``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from kvrelay.errors import DeadlineExceeded


class _Context(Protocol):
    """A servicer context; ``None``: the client set no deadline."""

    def time_remaining(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at``: the moment, in seconds of ``time.monotonic``."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline ``seconds`` from now."""
        return cls(time.monotonic() + seconds)

    @classmethod
    def from_context(cls, context: _Context, default: float, maximum: float) -> Deadline:
        """The client's deadline, ``default`` seconds without one, at most ``maximum`` seconds."""
        remaining = context.time_remaining()
        return cls.after(min(default if remaining is None else remaining, maximum))

    def remaining(self) -> float:
        """Seconds left, never negative, for any ``timeout`` parameter."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at

    def earlier(self, seconds: float) -> Deadline:
        """This deadline, or ``seconds`` from now if that is sooner."""
        return Deadline(min(self.at, time.monotonic() + seconds))

    def check(self, doing: str) -> None:
        """Raise ``DeadlineExceeded``, naming the action, if the deadline has expired."""
        if self.expired:
            raise DeadlineExceeded(f"no time left {doing}")

    @asynccontextmanager
    async def limit(self, doing: str) -> AsyncIterator[None]:
        """End the block at the deadline, with the error of ``check``."""
        try:
            async with asyncio.timeout(self.remaining()):
                yield
        except TimeoutError:
            raise DeadlineExceeded(f"no time left {doing}") from None
