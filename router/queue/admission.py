"""Who may go to the workers, who waits, who is refused and for how long. Pure, time passed in.

As many requests are under way as the workers run at once, and a few more; the others wait in a
fair queue, bounded in tokens and in the time it would take at the rate it drains. More would only
make all of them late. Whoever is refused is told when there will be room: the tokens of those
refused before count, so that not all come back at one moment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvrelay.errors import Exhausted
from router.queue.fair import FairQueue, QueuedRequest
from router.queue.service_times import ServiceTimes

UNKNOWN_SECONDS = 1.0  # to wait where no rate is known
SURE = 1.5  # times as long as usual: by then most have ended, and one that has not was in vain
SHORTEST, LONGEST = 0.05, 60.0  # seconds that somebody is told to wait


@dataclass(frozen=True, slots=True)
class AdmissionStep:
    """What follows from one event: keys of those that go now, and of those that may not wait."""

    go: tuple[int, ...] = ()
    refused: tuple[tuple[int, Exhausted], ...] = ()


class AdmissionControl:
    """All of a router's requests between their arrival and their end.

    ``slots`` of them may be under way; ``halted`` says that no worker can run any. Both are set by
    ``resize``.
    """

    def __init__(self, queue_tokens: int, queue_seconds: float) -> None:
        self._queue = FairQueue(queue_tokens)
        self._queue_seconds = queue_seconds
        self._runs = ServiceTimes()
        self.slots = 0
        self.halted = False
        self._promised: dict[str, tuple[float, float]] = {}  # tokens refused, by tenant; as of when
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
        return len(self._runs)

    @property
    def rate(self) -> float | None:
        """Tokens a second that leave the queue; ``None`` as long as that is not known."""
        return self._runs.rate(self.slots)

    def offer(self, one: QueuedRequest, now: float) -> AdmissionStep:
        """A request came. ``Exhausted`` if it may not wait."""
        self._runs.look(now, self.halted)
        if not self._queue and len(self._runs) < self.slots:
            self._queue.forgive()
            self._runs.begin(one.key, one.tokens, one.kind)
            return AdmissionStep(go=(one.key,))
        estimate, takes = self._estimate(one), self._takes(one)
        allowed = max(0.0, min(one.until - now - takes, self._queue_seconds))
        if estimate > allowed:
            raise self._refuse(
                "too_late",
                f"it would wait for about {estimate:.1f} s and take {takes:.1f} s more: it has"
                f" {one.until - now:.1f} s, and may wait for {self._queue_seconds:.1f} s",
                self._later(one, now, estimate - allowed),
            )
        pushed = self._queue.push(one)
        if pushed is None:
            raise self._full("queue_full", one, now)
        out = tuple((out.key, self._full("pushed_out", out, now)) for out in pushed)
        step = self._go(now)
        return AdmissionStep(step.go, out + step.refused)

    @property
    def crowd(self) -> float:
        """The most that any tenant has waiting, for its weight."""
        return self._queue.crowd

    def pushed_out(self, tenant: str, weight: float, now: float) -> Exhausted:
        """For one that made room before it came here."""
        why = "others have more right to the place"
        return self._refuse("pushed_out", why, self.later(tenant, weight, now))

    def crowd_out(self, tenant: str, weight: float, count: int, now: float) -> AdmissionStep:
        """There are ``count``, too many: the last of whoever has most makes room for ``tenant``.

        ``Exhausted`` where nobody has more than it would have.
        """
        self._runs.look(now, self.halted)
        last = self._queue.crowded(tenant, weight)
        if last is None:
            why = f"{count} requests are under way or waiting"
            raise self._refuse("too_many", why, self.later(tenant, weight, now))
        self._queue.remove(last.key)
        return AdmissionStep(refused=((last.key, self._full("pushed_out", last, now)),))

    def missed(self, one: QueuedRequest, now: float) -> Exhausted:
        """For one whose turn did not come in time."""
        why = "its turn did not come in time"
        return self._refuse("no_turn", why, self._later(one, now))

    def leave(self, key: int, now: float, whole: bool = True) -> AdmissionStep:
        """A request ended, or waits no more; ``whole`` says that it was not cut off."""
        self._runs.look(now, self.halted)
        if key in self._runs:
            self._runs.end(key, whole, self.slots)
        self._queue.remove(key)
        return self._go(now)

    def resize(self, slots: int, now: float, halted: bool = False) -> AdmissionStep:
        """Those under way stay. Time in which all is halted says nothing of the rate."""
        self.slots = slots
        self.halted = halted
        self._runs.look(now, halted)
        return self._go(now)

    def _go(self, now: float) -> AdmissionStep:
        gone, late = [], []
        while len(self._runs) < self.slots and (one := self._queue.first) is not None:
            if len(self._queue) > 1 and now + self._takes(one) > one.until:
                self._queue.remove(one.key)  # others can use its place
                late.append((one.key, self._late(one, now)))
                continue
            self._queue.pop()
            self._runs.begin(one.key, one.tokens, one.kind)
            gone.append(one.key)
        return AdmissionStep(tuple(gone), tuple(late))

    def _late(self, one: QueuedRequest, now: float) -> Exhausted:
        left, takes = max(0.0, one.until - now), self._takes(one)
        why = f"its turn came {left:.1f} s before its deadline, and it would take {takes:.1f} s"
        return self._refuse("too_late", why, self._later(one, now))

    def _takes(self, one: QueuedRequest) -> float:
        return SURE * one.part * self._runs.expected(one.tokens, one.kind)

    def _estimate(self, one: QueuedRequest) -> float:
        """Seconds; whoever is next waits for half the time between two that leave the queue."""
        rate = self.rate
        return 0.0 if rate is None else (self._queue.ahead(one) + self._runs.usual() / 2) / rate

    def _full(self, reason: str, one: QueuedRequest, now: float) -> Exhausted:
        why = f"{len(self._queue)} requests of {self._queue.tokens} tokens are waiting"
        return self._refuse(reason, why, self._later(one, now))

    def _refuse(self, reason: str, why: str, seconds: float) -> Exhausted:
        self.refused[reason] += 1
        return Exhausted(f"{why}: ask again in {seconds:.2g} s", seconds)

    def _later(self, one: QueuedRequest, now: float, least: float = 0.0) -> float:
        return self.later(one.tenant, one.weight, now, one.tokens, least)

    def later(
        self, tenant: str, weight: float, now: float, tokens: float = 0.0, least: float = 0.0
    ) -> float:
        """Seconds until a tenant has room for so many tokens more, or for a usual request.

        Where no rate is known, what is here now is taken to be gone in ``UNKNOWN_SECONDS``.
        """
        known, share = self.rate, self._queue.share(tenant, weight)
        here = max(self._queue.tokens + self._runs.tokens, 1)
        rate = share * (here / UNKNOWN_SECONDS if known is None else known)
        before, at = self._promised.get(tenant, (0.0, now))
        promised = max(0.0, before - rate * (now - at)) + (tokens or self._runs.usual())
        self._promised[tenant] = min(promised, LONGEST * rate), now
        shortest = UNKNOWN_SECONDS if known is None else SHORTEST
        return min(max(least, promised / rate, shortest), LONGEST)
