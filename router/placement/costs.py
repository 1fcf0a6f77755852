"""Costs of computing, fetching and waiting here, estimated from the usage of legs. Pure.

A prompt goes to a prefill worker if that is worth the handoff: not if it is short, or if a decode
worker holds nearly all of it; but if it is long, since the streams of the decode worker stand still
while it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.98  # of the points before, with each leg
PRIOR = 0.1  # weight of a prior point: a tenth of a leg
FAR = 1024  # tokens: where the second prior point lies
STALL = 0.5  # cost of delaying a stream by a second, in seconds of this request's wait
HANDOFF = 0.01  # seconds that a handoff takes besides its transfer: a call, a lookup, a save


class LinearFit:
    """``seconds = base + slope * tokens``: least squares, older points count less."""

    def __init__(self, base: float, slope: float) -> None:
        self._prior = [(0.0, base), (float(FAR), base + slope * FAR)]
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._line = base, slope

    def add(self, tokens: int, seconds: float) -> None:
        """One more point."""
        self._sums = _added(tuple(DECAY * total for total in self._sums), tokens, seconds, 1.0)
        sums = self._sums
        for x, y in self._prior:
            sums = _added(sums, x, y, PRIOR)
        weight, x, y, xx, xy = sums
        slope = max(0.0, (weight * xy - x * y) / (weight * xx - x * x))
        self._line = max(0.0, (y - slope * x) / weight), slope

    @property
    def slope(self) -> float:
        """Seconds for each token more."""
        return self._line[1]

    def at(self, tokens: int) -> float:
        """Seconds for ``tokens``; 0 for none."""
        base, slope = self._line
        return base + slope * tokens if tokens > 0 else 0.0


def _added(
    sums: tuple[float, ...], x: float, y: float, weight: float
) -> tuple[float, float, float, float, float]:
    w, sx, sy, sxx, sxy = sums
    return (
        w + weight,
        sx + weight * x,
        sy + weight * y,
        sxx + weight * x * x,
        sxy + weight * x * y,
    )


@dataclass(frozen=True, slots=True)
class LegTimings:
    """Of one leg: positions computed before its first token, tokens fetched, seconds of each."""

    computed: int
    run_seconds: float
    fetched: int
    load_seconds: float


@dataclass(frozen=True, slots=True)
class ComputeSite:
    """A worker that could compute a prompt: tokens of it that it holds, or could fetch.

    ``queued``: tokens that it computes before. ``streams``: requests that would be delayed.
    """

    held: int
    stored: int
    queued: int
    streams: int = 0


class Costs:
    """The estimates of one fleet."""

    def __init__(self) -> None:
        self.compute = LinearFit(0.001, 0.0005)
        self.transfer = LinearFit(0.005, 0.000005)

    def learn(self, leg: LegTimings) -> None:
        """Take in a leg that ran undisturbed."""
        if leg.computed > 0:
            self.compute.add(leg.computed, leg.run_seconds)
        if leg.fetched > 0:
            self.transfer.add(leg.fetched, leg.load_seconds)

    def prefers_direct(self, tokens: int, prefill: ComputeSite, decode: ComputeSite) -> bool:
        """Whether a prompt of ``tokens`` is computed sooner by the decode worker itself."""
        stall = self.compute.at(self._fresh(tokens, decode)) * STALL * (decode.streams + 1)
        direct = self._first_token(tokens, decode) + stall
        transfer = self.transfer.at(tokens - decode.held)
        return direct <= self._first_token(tokens, prefill) + HANDOFF + transfer

    def _first_token(self, tokens: int, site: ComputeSite) -> float:
        fetched = max(0, min(site.stored, tokens - 1) - site.held)
        wait = self.compute.slope * site.queued
        return wait + self.transfer.at(fetched) + self.compute.at(self._fresh(tokens, site))

    def _fresh(self, tokens: int, site: ComputeSite) -> int:
        return max(1, tokens - max(site.held, site.stored))
