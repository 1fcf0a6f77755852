"""The requests under way, and what those that ended say: how fast slots come free, and how long
one takes. Pure, time passed in.

Each kind says for itself how long. Where answers of an hour spoke for answers of seconds, these
would be refused, none of them would end, and nobody would know better.
"""

from __future__ import annotations

from dataclasses import dataclass

FEW = 16  # after so many that ended, or as many as there are slots, one before counts half
FORGOTTEN = 120.0  # seconds in which none was under way


@dataclass(slots=True)
class _Past:
    """Of all requests, or of one kind; ``last`` is when one ended, or began."""

    tokens: float = 0.0
    seconds: float = 0.0
    ended: float = 0.0
    running: int = 0
    last: float = 0.0

    def stale(self, now: float) -> bool:
        return not self.running and now - self.last > FORGOTTEN

    def begin(self, now: float, kept: float) -> None:
        """``kept``: what its past counts, where that is long ago."""
        if self.stale(now):
            self._keep(kept)
        self.running = self.running + 1
        self.last = now

    def end(self, now: float) -> None:
        self.running = self.running - 1
        self.last = now

    def note(self, tokens: int, seconds: float, kept: float) -> None:
        """What came of one that ended."""
        self._keep(kept)
        self.tokens += tokens
        self.seconds += seconds
        self.ended += 1.0

    def _keep(self, part: float) -> None:
        self.tokens *= part
        self.seconds *= part
        self.ended *= part


class ServiceTimes:
    """Each takes a slot. Time in which all is halted does not count."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[int, int, float]] = {}  # tokens, kind, and since when
        self._tokens = 0  # of these
        self._all = _Past()
        self._kinds: dict[int, _Past] = {}
        self._at = 0.0
        self._stood = 0.0
        self._halted = False

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: int) -> bool:
        return key in self._running

    def look(self, now: float, halted: bool) -> None:
        """Time has passed; ``halted`` says what is from now on."""
        if self._halted:
            self._stood += max(0.0, now - self._at)
        self._at = now
        self._halted = halted

    def begin(self, key: int, tokens: int, kind: int = 0) -> None:
        """A request of so many goes."""
        now = self._now
        self._all.begin(now, 0.0)
        self._kinds.setdefault(kind, _Past()).begin(now, 1 / FEW)  # the next says more than it
        self._running[key] = tokens, kind, now
        self._tokens += tokens

    def end(self, key: int, whole: bool, slots: int) -> None:
        """It ended. One that was cut off says only that it would have taken longer."""
        now, (tokens, kind, since) = self._now, self._running.pop(key)
        self._tokens -= tokens
        seconds, pasts = now - since, (self._all, self._kinds[kind])
        for past in pasts:
            past.end(now)
        if not whole and seconds < self.expected(tokens, kind):
            return
        for past in pasts:
            past.note(tokens, seconds, 0.5 ** (1.0 / max(slots, FEW)))

    def rate(self, slots: int) -> float | None:
        """Tokens a second for which slots come free; ``None`` where nothing is known.

        Where all are taken, and more time passes than they should need, it becomes less.
        """
        tokens, seconds = self._all.tokens, self._all.seconds
        if not seconds:
            return None
        if len(self._running) < slots:
            return slots * tokens / seconds
        due = slots * self.usual()
        late = (tokens + due) / (seconds + slots * (self._now - self._all.last))
        return slots * min(tokens / seconds, late)

    def expected(self, tokens: int, kind: int = 0) -> float:
        """Seconds that one of so many tokens takes, or that most take where that is less.

        Where none of its kind is under way for long, one may try how long it takes now.
        """
        past = self._kinds.get(kind)
        if past is None or not past.ended or past.stale(self._now):
            return 0.0
        return past.seconds * min(1.0 / past.ended, tokens / past.tokens)

    def usual(self) -> float:
        """Tokens of one, as far as is known."""
        if self._all.ended:
            return self._all.tokens / self._all.ended
        return self._tokens / len(self._running) if self._running else 1.0

    @property
    def tokens(self) -> int:
        """Of all that are under way."""
        return self._tokens

    @property
    def _now(self) -> float:
        return self._at - self._stood
