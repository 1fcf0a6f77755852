"""Service times: how long requests run, and how fast slots become free. Pure; time is passed in.

Requests of one kind are measured for themselves. If answers of an hour set the estimate for answers
of seconds, the short ones would be refused, none would end, and the estimate would never change.
"""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE = 16  # requests: after so many more, or as many as there are slots, one counts half
STALE_SECONDS = 120.0  # without a running request
SHORTEST_CUT = 1.0  # seconds: one cut off sooner says nothing if none of its kind has ended


@dataclass(slots=True)
class _Record:
    """Sums over requests that ended, of all kinds or of one; older requests count less.

    ``last`` is when a request last began or ended.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    ended: float = 0.0
    running: int = 0
    last: float = 0.0

    def stale(self, now: float) -> bool:
        return not self.running and now - self.last > STALE_SECONDS

    def begin(self, now: float, weight: float) -> None:
        """``weight``: what a stale record still counts."""
        if self.stale(now):
            self._decay(weight)
        self.running += 1
        self.last = now

    def end(self, now: float) -> None:
        self.running -= 1
        self.last = now

    def add(self, tokens: int, seconds: float, decay: float) -> None:
        """A request that ended."""
        self._decay(decay)
        self.tokens += tokens
        self.seconds += seconds
        self.ended += 1.0

    def _decay(self, factor: float) -> None:
        self.tokens *= factor
        self.seconds *= factor
        self.ended *= factor


class ServiceTimes:
    """The running requests, each of which has a slot. Time while halted does not count."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[int, int, float]] = {}  # tokens, kind, when it began
        self._tokens = 0  # of the running requests
        self._all = _Record()
        self._kinds: dict[int, _Record] = {}
        self._at = 0.0
        self._halted_seconds = 0.0
        self._halted = False

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: int) -> bool:
        return key in self._running

    def advance(self, now: float, halted: bool) -> None:
        """Time has passed; ``halted`` holds from now on."""
        if self._halted:
            self._halted_seconds += max(0.0, now - self._at)
        self._at = now
        self._halted = halted

    def begin(self, key: int, tokens: int, kind: int = 0) -> None:
        """A request of ``tokens`` takes a slot."""
        now = self._now
        self._all.begin(now, 0.0)
        self._kinds.setdefault(kind, _Record()).begin(now, 1 / HALF_LIFE)
        self._running[key] = tokens, kind, now
        self._tokens += tokens

    def end(self, key: int, slots: int, whole: bool = True, moved: bool = False) -> None:
        """It ended.

        A request that was cut off says only that it would have run longer. One that ``moved``,
        since it lost a worker, says nothing about requests that lose none.
        """
        tokens, kind, since = self._running.pop(key)
        self._tokens -= tokens
        now = self._now
        seconds = now - since
        records = self._all, self._kinds[kind]
        for record in records:
            record.end(now)
        least = self.expected_seconds(tokens, kind) or SHORTEST_CUT
        if moved or (not whole and seconds < least):
            return
        for record in records:
            record.add(tokens, seconds, 0.5 ** (1.0 / max(slots, HALF_LIFE)))

    def rate(self, slots: int) -> float | None:
        """Tokens a second for which slots become free; ``None`` until it is known.

        It falls if all slots are taken for longer than they should be.
        """
        tokens, seconds = self._all.tokens, self._all.seconds
        if not seconds:
            return None
        if len(self._running) < slots:
            return slots * tokens / seconds
        due = slots * self.usual_tokens()
        late = (tokens + due) / (seconds + slots * (self._now - self._all.last))
        return slots * min(tokens / seconds, late)

    def expected_seconds(self, tokens: int, kind: int = 0) -> float:
        """Service time of a request of ``tokens``; at most the usual one of its kind.

        0 if none of its kind ran for long: one of them has to try how long it takes now.
        """
        record = self._kinds.get(kind)
        if record is None or not record.ended or record.stale(self._now):
            return 0.0
        return record.seconds * min(1.0 / record.ended, tokens / record.tokens)

    def usual_tokens(self) -> float:
        """Tokens of a usual request, as far as is known."""
        if self._all.ended:
            return self._all.tokens / self._all.ended
        return self._tokens / len(self._running) if self._running else 1.0

    @property
    def tokens(self) -> int:
        """Of the running requests."""
        return self._tokens

    @property
    def _now(self) -> float:
        """A clock that stands still while halted."""
        return self._at - self._halted_seconds
