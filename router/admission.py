"""Who may go to the workers, who waits, who is refused and for how long. Pure, time passed in.

As many requests are under way as the workers run at once, and a few more; the others wait in a
fair queue, bounded in tokens and in the time it would take at the rate it drains. More would only
make all of them late. Whoever is refused is told when there will be room: the tokens of those
refused before count, so that not all come back at one moment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from common.errors import Exhausted
from router.fair import FairQueue, Waiting

HALF_LIFE = 10.0  # seconds with a queue, after which a measure counts half
KNOWN_SECONDS = 0.01  # that a measure must count: it is forgotten two minutes after the last queue
UNKNOWN_SECONDS = 1.0  # to wait where no rate is known
SHORTEST, LONGEST = 0.05, 60.0  # seconds that somebody is told to wait


class Drain:
    """Tokens a second that leave the queue, measured only while there is one.

    Those that fill all slots at one moment end one by one, the shortest first: until as many have
    left the queue as there are slots, what was measured says too little.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._gone = 0  # requests, since there was nothing known
        self._at = 0.0
        self._queued = False

    def look(self, now: float, queued: bool) -> None:
        """Time has passed; ``queued`` says whether there is a queue from now on.

        A measure ages also while there is none, so that the next queue soon outweighs it, and is
        no reason to refuse anyone when it is old.
        """
        if self._queued or queued:
            passed = max(0.0, now - self._at)
            kept = 0.5 ** (passed / HALF_LIFE)
            self._tokens *= kept
            self._seconds = self._seconds * kept + (passed if self._queued else 0.0)
            self._at = now
            if self._seconds < KNOWN_SECONDS:
                self._gone = 0
        self._queued = queued

    def went(self, tokens: int) -> None:
        """A request of so many left it."""
        self._tokens += tokens
        self._gone += 1

    def rate(self, slots: int) -> float | None:
        """``None`` as long as too little is known, or what is known is too old."""
        known = self._gone >= slots and self._tokens and self._seconds >= KNOWN_SECONDS
        return self._tokens / self._seconds if known else None


@dataclass(frozen=True, slots=True)
class Step:
    """What follows from one event: keys of those that go now, and of those that may not wait."""

    go: tuple[int, ...] = ()
    refused: tuple[tuple[int, Exhausted], ...] = ()


class Admission:
    """All of a router's requests between their arrival and their end.

    ``slots`` of them may be under way; ``halted`` says that no worker can run any. Both are set by
    ``resize``.
    """

    def __init__(self, queue_tokens: int, queue_seconds: float) -> None:
        self._queue = FairQueue(queue_tokens)
        self._queue_seconds = queue_seconds
        self._drain = Drain()
        self._running: set[int] = set()
        self.slots, self.halted = 0, False
        self._promised, self._promised_at = 0.0, 0.0  # tokens of the refused that may be back soon
        self.refused = Counter[str]()  # by reason

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """All they can come to."""
        return self._queue.tokens

    @property
    def running(self) -> int:
        """How many are under way."""
        return len(self._running)

    @property
    def rate(self) -> float | None:
        """Tokens a second that leave the queue; ``None`` as long as that is not known."""
        return self._drain.rate(self.slots)

    def offer(self, one: Waiting, now: float, time_left: float) -> Step:
        """A request came and has ``time_left`` seconds. ``Exhausted`` if it may not wait."""
        self._look(now)
        if not self._queue and len(self._running) < self.slots:
            self._running.add(one.key)
            return Step(go=(one.key,))
        allowed, estimate = min(time_left, self._queue_seconds), self._estimate(one)
        if estimate > allowed:
            raise self._refuse(
                "too_late",
                f"it would wait for about {estimate:.1f} s, and may for {allowed:.1f} s",
                self.later(one.tokens, now, estimate - allowed),
            )
        pushed = self._queue.push(one)
        if pushed is None:
            raise self._full("queue_full", one.tokens, now)
        out = tuple((one.key, self._full("pushed_out", one.tokens, now)) for one in pushed)
        return Step(self._go(now), out)

    @property
    def crowd(self) -> float:
        """The most that any tenant has waiting, for its weight."""
        return self._queue.crowd

    def pushed_out(self, now: float) -> Exhausted:
        """For one that made room before it came here."""
        why = "others have more right to the place"
        return self._refuse("pushed_out", why, self.later(1, now))

    def crowd_out(self, tenant: str, weight: float, count: int, now: float) -> Step:
        """There are ``count``, too many: the last of whoever has most makes room for ``tenant``.

        ``Exhausted`` where nobody has more than it would have.
        """
        self._look(now)
        last = self._queue.crowded(tenant, weight)
        if last is None:
            why = f"{count} requests are under way or waiting"
            raise self._refuse("too_many", why, self.later(1, now))
        self._queue.remove(last.key)
        return Step(refused=((last.key, self._full("pushed_out", last.tokens, now)),))

    def missed(self, now: float) -> Exhausted:
        """For one whose turn did not come in time."""
        return self._refuse("no_turn", "its turn did not come in time", self.later(1, now))

    def leave(self, key: int, now: float) -> Step:
        """A request ended, or waits no more."""
        self._look(now)
        self._running.discard(key)
        self._queue.remove(key)
        return Step(self._go(now))

    def resize(self, slots: int, now: float, halted: bool = False) -> Step:
        """Those under way stay. Time in which all is halted says nothing of the rate."""
        self._look(now)
        self.slots, self.halted = slots, halted
        return Step(self._go(now))

    def _go(self, now: float) -> tuple[int, ...]:
        gone = []
        while len(self._running) < self.slots and (one := self._queue.pop()) is not None:
            self._running.add(one.key)
            self._drain.went(one.tokens)
            gone.append(one.key)
        self._look(now)
        return tuple(gone)

    def _look(self, now: float) -> None:
        self._drain.look(now, bool(self._queue) and not self.halted)

    def _estimate(self, one: Waiting) -> float:
        rate = self.rate
        return 0.0 if rate is None else self._queue.ahead(one) / rate

    def _full(self, reason: str, tokens: int, now: float) -> Exhausted:
        return self._refuse(
            reason,
            f"{len(self._queue)} requests of {self._queue.tokens} tokens are waiting",
            self.later(tokens, now),
        )

    def _refuse(self, reason: str, why: str, seconds: float) -> Exhausted:
        self.refused[reason] += 1
        return Exhausted(f"{why}: ask again in {seconds:.2g} s", seconds)

    def later(self, tokens: int, now: float, least: float = 0.0) -> float:
        """Seconds until there is room for so many tokens more."""
        rate = self.rate
        if rate is None:
            return max(least, UNKNOWN_SECONDS)
        drained = rate * (now - self._promised_at)
        promised = max(0.0, self._promised - drained) + tokens
        self._promised, self._promised_at = min(promised, LONGEST * rate), now
        return min(max(least, promised / rate, SHORTEST), LONGEST)
