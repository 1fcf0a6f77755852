"""One frozen point in time that is handed down a call instead of timeouts that are added up.

Made once at the edge, from the client's own deadline bounded by ours; everything that waits asks
``remaining()``. Times are of ``time.monotonic``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from kvrelay.errors import DeadlineExceeded


class _Context(Protocol):
    """What a servicer context is asked for here; ``None`` when the client set no deadline."""

    def time_remaining(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at`` is the moment, in seconds of ``time.monotonic``."""

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
        """Seconds left, never negative: fit for any ``timeout`` parameter."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.at

    def earlier(self, seconds: float) -> Deadline:
        """This deadline, or ``seconds`` from now if that is sooner."""
        return Deadline(min(self.at, time.monotonic() + seconds))

    def check(self, doing: str) -> None:
        """Raise ``DeadlineExceeded`` saying what there was no time for."""
        if self.expired:
            raise DeadlineExceeded(f"no time left {doing}")
