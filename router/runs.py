"""The requests under way, and what those that ended say: how fast slots come free, and how long
one takes. Pure, time passed in.
"""

from __future__ import annotations

FEW = 16  # after so many that ended, or as many as there are slots, one before counts half
FORGOTTEN = 120.0  # seconds in which none was under way


class Runs:
    """Each takes a slot. Time in which all is halted does not count."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[int, float]] = {}  # tokens, and since when
        self._tokens = 0  # of these
        self._ended_tokens = self._ended_seconds = self._ended = 0.0
        self._last = 0.0  # when one did, or began
        self._at, self._stood, self._halted = 0.0, 0.0, False

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: int) -> bool:
        return key in self._running

    def look(self, now: float, halted: bool) -> None:
        """Time has passed; ``halted`` says what is from now on."""
        if self._halted:
            self._stood += max(0.0, now - self._at)
        self._at, self._halted = now, halted

    def begin(self, key: int, tokens: int) -> None:
        """A request of so many goes."""
        now = self._now
        if not self._running and now - self._last > FORGOTTEN:
            self._ended_tokens = self._ended_seconds = self._ended = 0.0
        self._running[key] = tokens, now
        self._tokens += tokens
        self._last = now

    def end(self, key: int, whole: bool, slots: int) -> None:
        """It ended. One that was cut off says only that it would have taken longer."""
        now, (tokens, since) = self._now, self._running.pop(key)
        self._tokens -= tokens
        self._last, seconds = now, now - since
        if not whole and seconds < self.expected(tokens):
            return
        kept = 0.5 ** (1.0 / max(slots, FEW))
        self._ended_tokens = self._ended_tokens * kept + tokens
        self._ended_seconds = self._ended_seconds * kept + seconds
        self._ended = self._ended * kept + 1.0

    def rate(self, slots: int) -> float | None:
        """Tokens a second for which slots come free; ``None`` where nothing is known.

        Where all are taken, and more time passes than they should need, it becomes less.
        """
        if not self._ended_seconds:
            return None
        tokens, seconds = self._ended_tokens, self._ended_seconds
        if len(self._running) < slots:
            return slots * tokens / seconds
        due = slots * self.usual()
        late = (tokens + due) / (seconds + slots * (self._now - self._last))
        return slots * min(tokens / seconds, late)

    def expected(self, tokens: int) -> float:
        """Seconds that one of so many tokens takes, or that most take where that is less."""
        if not self._ended:
            return 0.0
        return self._ended_seconds * min(1.0 / self._ended, tokens / self._ended_tokens)

    def usual(self) -> float:
        """Tokens of one, as far as is known."""
        if self._ended:
            return self._ended_tokens / self._ended
        return self._tokens / len(self._running) if self._running else 1.0

    @property
    def tokens(self) -> int:
        """Of all that are under way."""
        return self._tokens

    @property
    def _now(self) -> float:
        return self._at - self._stood
