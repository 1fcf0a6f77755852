"""Admission control: which requests run, which wait, which are refused. Pure; time is passed in.

As many requests run as the workers can run at once, and a few more. The others wait in a fair queue
that is bounded in tokens and in the time that it needs at the rate at which it drains; a longer
queue would only make every request late. A refused request gets a time to retry after, which counts
the tokens of the requests refused before, so that they do not all return at one moment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvrelay.errors import Exhausted
from router.queue.fair import FairQueue, QueuedRequest
from router.queue.service_times import ServiceTimes

UNKNOWN_SECONDS = 1.0  # to wait if no rate is known
MARGIN = 1.5  # times the usual service time: most requests have ended by then
SHORTEST, LONGEST = 0.05, 60.0  # seconds to retry after


@dataclass(frozen=True, slots=True)
class AdmissionStep:
    """What follows from one event: keys of requests that run now, and of refused ones."""

    started: tuple[int, ...] = ()
    refused: tuple[tuple[int, Exhausted], ...] = ()


class AdmissionControl:
    """The requests of a router from arrival to end. At most ``slots`` of them run.

    ``halted``: no worker is usable. ``resize`` sets both.
    """

    def __init__(self, queue_tokens: int, queue_seconds: float) -> None:
        self._queue = FairQueue(queue_tokens)
        self._queue_seconds = queue_seconds
        self._service = ServiceTimes()
        self.slots = 0
        self.halted = False
        self._promised: dict[str, tuple[float, float]] = {}  # by tenant: tokens refused, as of when
        self.refused = Counter[str]()  # by reason

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """The most tokens that the waiting requests can need."""
        return self._queue.tokens

    @property
    def running(self) -> int:
        """Number of running requests."""
        return len(self._service)

    @property
    def rate(self) -> float | None:
        """Tokens a second that leave the queue; ``None`` until it is known."""
        return self._service.rate(self.slots)

    @property
    def max_load(self) -> float:
        """Waiting requests of the most loaded tenant, divided by its weight."""
        return self._queue.max_load

    def offer(self, request: QueuedRequest, now: float) -> AdmissionStep:
        """A request arrives. ``Exhausted`` if it may not wait."""
        self._service.advance(now, self.halted)
        if not self._queue and len(self._service) < self.slots:
            self._queue.reset()
            self._service.begin(request.key, request.tokens, request.kind)
            return AdmissionStep(started=(request.key,))
        wait, service = self._expected_wait(request), self._service_time(request)
        allowed = max(0.0, min(request.until - now - service, self._queue_seconds))
        if wait > allowed:
            raise self._refuse(
                "too_late",
                f"it would wait for about {wait:.1f} s and take {service:.1f} s more: it has"
                f" {request.until - now:.1f} s, and may wait for {self._queue_seconds:.1f} s",
                self._retry_after(request, now, wait - allowed),
            )
        evicted = self._queue.push(request)
        if evicted is None:
            raise self._full("queue_full", request, now)
        out = tuple((other.key, self._full("evicted", other, now)) for other in evicted)
        step = self._start_waiting(now)
        return AdmissionStep(step.started, out + step.refused)

    def check_samples(self, samples: int, tokens: int) -> None:
        """``Exhausted`` if samples of so many tokens could not wait together in an empty queue.

        More workers may come: it is no mistake of the request, and asking again is no use without.
        """
        waiting, limit = samples - self.slots, self._queue.limit
        if waiting * tokens > limit and not self.halted:
            self.refused["queue_full"] += 1
            raise Exhausted(
                f"n: {waiting} of {samples} answers would have to wait, with up to"
                f" {waiting * tokens} tokens, and at most {limit} may (--queue-tokens): ask for"
                " fewer or shorter answers",
                UNKNOWN_SECONDS,
            )

    def evict_for(self, tenant: str, weight: float, count: int, now: float) -> AdmissionStep:
        """Evict the newest request of the most loaded tenant for one of ``tenant``.

        There are ``count`` requests, too many. ``Exhausted`` if ``tenant`` would then have as many.
        """
        self._service.advance(now, self.halted)
        last = self._queue.evictable(tenant, weight)
        if last is None:
            why = f"{count} requests are under way or waiting"
            raise self._refuse("too_many", why, self.retry_after(tenant, weight, now))
        self._queue.remove(last.key)
        return AdmissionStep(refused=((last.key, self._full("evicted", last, now)),))

    def evicted(self, tenant: str, weight: float, now: float) -> Exhausted:
        """The error for a request that was evicted before it was offered here."""
        why = "a tenant with fewer requests needs the place"
        return self._refuse("evicted", why, self.retry_after(tenant, weight, now))

    def timed_out(self, request: QueuedRequest, now: float) -> Exhausted:
        """The error for a request that got no slot in time."""
        why = "no slot became free in time"
        return self._refuse("timed_out", why, self._retry_after(request, now))

    def leave(self, key: int, now: float, whole: bool = True, moved: bool = False) -> AdmissionStep:
        """A request ended or left the queue; ``whole``: it was not cut off.

        It ``moved`` to another worker if it lost one.
        """
        self._service.advance(now, self.halted)
        if key in self._service:
            self._service.end(key, self.slots, whole, moved)
        self._queue.remove(key)
        return self._start_waiting(now)

    def resize(self, slots: int, now: float, halted: bool = False) -> AdmissionStep:
        """Running requests stay. Time while halted does not count in the rate."""
        self.slots = slots
        self.halted = halted
        self._service.advance(now, halted)
        return self._start_waiting(now)

    def retry_after(
        self, tenant: str, weight: float, now: float, tokens: float = 0.0, least: float = 0.0
    ) -> float:
        """Seconds until a tenant has room for ``tokens`` more, or for a usual request.

        While no rate is known, all requests of now are taken to leave in ``UNKNOWN_SECONDS``.
        """
        known, share = self.rate, self._queue.share(tenant, weight)
        present = max(self._queue.tokens + self._service.tokens, 1)
        rate = share * (present / UNKNOWN_SECONDS if known is None else known)
        before, at = self._promised.get(tenant, (0.0, now))
        promised = max(0.0, before - rate * (now - at)) + (tokens or self._service.usual_tokens())
        self._promised[tenant] = min(promised, LONGEST * rate), now
        shortest = UNKNOWN_SECONDS if known is None else SHORTEST
        return min(max(least, promised / rate, shortest), LONGEST)

    def _start_waiting(self, now: float) -> AdmissionStep:
        """Run waiting requests while there are slots."""
        started, late = [], []
        while len(self._service) < self.slots and (request := self._queue.first()) is not None:
            if len(self._queue) > 1 and now + self._service_time(request) > request.until:
                self._queue.remove(request.key)  # others can use its place
                late.append((request.key, self._late(request, now)))
                continue
            self._queue.pop()
            self._service.begin(request.key, request.tokens, request.kind)
            started.append(request.key)
        return AdmissionStep(tuple(started), tuple(late))

    def _service_time(self, request: QueuedRequest) -> float:
        expected = self._service.expected_seconds(request.tokens, request.kind)
        return MARGIN * request.part * expected

    def _expected_wait(self, request: QueuedRequest) -> float:
        """Seconds; the first one waits for half the time between two that leave the queue."""
        rate = self.rate
        if rate is None:
            return 0.0
        return (self._queue.ahead(request) + self._service.usual_tokens() / 2) / rate

    def _late(self, request: QueuedRequest, now: float) -> Exhausted:
        left, service = max(0.0, request.until - now), self._service_time(request)
        why = f"its slot came {left:.1f} s before its deadline, and it would take {service:.1f} s"
        return self._refuse("too_late", why, self._retry_after(request, now))

    def _full(self, reason: str, request: QueuedRequest, now: float) -> Exhausted:
        queue = self._queue
        why = (
            f"{len(queue)} requests, {queue.tokens} tokens in all, are waiting, this one needs"
            f" {request.tokens}, and at most {queue.limit} may wait (--queue-tokens)"
        )
        return self._refuse(reason, why, self._retry_after(request, now))

    def _refuse(self, reason: str, why: str, seconds: float) -> Exhausted:
        self.refused[reason] += 1
        return Exhausted(f"{why}: ask again in {seconds:.2g} s", seconds)

    def _retry_after(self, request: QueuedRequest, now: float, least: float = 0.0) -> float:
        return self.retry_after(request.tenant, request.weight, now, request.tokens, least)
