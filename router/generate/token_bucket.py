"""How fast streams may go on elsewhere: a bucket of tokens, filled at a rate. Pure, time passed in.

When many streams lose their worker at once, those that are left get them one after another, not
all in one moment.
"""

from __future__ import annotations


class TokenBucket:
    """At most ``burst`` at once and ``rate`` a second in the long run."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._full_at = float("-inf")  # when it would be full again

    def take(self, now: float) -> float:
        """Take one; seconds to wait before it may be used."""
        self._full_at = max(self._full_at, now) + 1.0 / self._rate
        return max(0.0, self._full_at - now - self._burst / self._rate)
