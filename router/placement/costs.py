"""What computing, fetching and waiting cost here, learnt from the accounts of legs. Pure.

A prompt goes to a prefill worker when that is worth the hand-over. It is not for one that is short,
or of which a decode worker holds nearly all; it is for a long one, because the streams of the
decode worker stand still while it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.98  # of what was learnt, with each leg
PRIOR = 0.1  # weight of what is believed before: as much as a tenth of a leg
FAR = 1024  # tokens: where the second point of a prior lies
STALL = 0.5  # price of holding up a stream for a second, in seconds of this request's wait
HANDOVER = 0.01  # seconds a hand-over takes beside its transfer: a call more, a lookup, a save


class LinearFit:
    """``seconds = base + slope * tokens``: least squares, older points count less."""

    def __init__(self, base: float, slope: float) -> None:
        self._prior = [(0.0, base), (float(FAR), base + slope * FAR)]
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._line = base, slope

    def learn(self, tokens: int, seconds: float) -> None:
        """One more point."""
        self._sums = _added(tuple(DECAY * one for one in self._sums), tokens, seconds, 1.0)
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
        """Seconds for so many tokens, none for none."""
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
    """What a worker has for a prompt: tokens held, tokens it could fetch, work that waits there."""

    held: int
    stored: int
    queued: int  # tokens to compute before
    streams: int = 0


class Costs:
    """The estimates of one fleet."""

    def __init__(self) -> None:
        self.compute = LinearFit(0.001, 0.0005)
        self.transfer = LinearFit(0.005, 0.000005)

    def learn(self, account: LegTimings) -> None:
        """Take the account of a leg in that ran undisturbed."""
        if account.computed > 0:
            self.compute.learn(account.computed, account.run_seconds)
        if account.fetched > 0:
            self.transfer.learn(account.fetched, account.load_seconds)

    def prefers_direct(self, tokens: int, prefill: ComputeSite, decode: ComputeSite) -> bool:
        """Whether a prompt of so many tokens is better computed by the decode worker itself."""
        stall = self.compute.at(self._fresh(tokens, decode)) * STALL * (decode.streams + 1)
        direct = self._first_token(tokens, decode) + stall
        handed = self.transfer.at(tokens - decode.held)
        return direct <= self._first_token(tokens, prefill) + HANDOVER + handed

    def _first_token(self, tokens: int, offer: ComputeSite) -> float:
        fetched = max(0, min(offer.stored, tokens - 1) - offer.held)
        wait = self.compute.slope * offer.queued
        return wait + self.transfer.at(fetched) + self.compute.at(self._fresh(tokens, offer))

    def _fresh(self, tokens: int, offer: ComputeSite) -> int:
        return max(1, tokens - max(offer.held, offer.stored))
