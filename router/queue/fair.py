"""A queue that is fair to tenants, counted in tokens. Pure: it only says which request is next.

Start-time fair queueing (Goyal, Vin, Cheng 1996): each tenant has a virtual time that grows by
tokens / weight with every request of it that leaves; the tenant with the least is next. Two tenants
that both have requests waiting never differ by more than one request of each. Within a tenant a
priority is worth a fixed number of tokens: a request is overtaken by requests of higher priority
that arrive within so many tokens after it, and by no others, so that none starves.

If the queue is full, a tenant with less than its share evicts the newest request of the tenant that
has the most for its weight.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

LOWEST, HIGHEST = -8, 8
PRIORITY_TOKENS = 4096  # that one step of priority is worth


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """``tokens``: the most it can need. ``until``: its deadline, ``timeout`` s after its arrival.

    ``part``: the fraction of its output that is still to be generated.
    """

    key: int
    tokens: int
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    until: float = math.inf
    part: float = 1.0
    timeout: float = math.inf

    @property
    def kind(self) -> int:
        """The binary exponent of its timeout: requests of one kind take about as long."""
        return math.frexp(self.timeout)[1]


Allows: TypeAlias = "Callable[[QueuedRequest], bool]"


def _always(_: QueuedRequest) -> bool:
    return True


@dataclass(slots=True)
class _Line:
    """The waiting requests of one tenant: (rank, key) in order."""

    weight: float
    start: float  # virtual time of the first of them
    ranks: list[tuple[int, int]] = field(default_factory=list)
    tokens: int = 0
    arrived: int = 0  # tokens, since the line began

    @property
    def load(self) -> float:
        return len(self.ranks) / self.weight

    def tokens_before(self, start: float) -> float:
        """Estimated tokens of its requests that start before a virtual time."""
        if start < self.start:
            return 0.0
        first = self.tokens / len(self.ranks)
        return min(float(self.tokens), (start - self.start) * self.weight + first)


class FairQueue:
    """At most ``limit`` tokens wait."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: dict[int, QueuedRequest] = {}
        self._lines: dict[str, _Line] = {}
        self._ends: dict[str, float] = {}  # virtual time of tenants without waiting requests
        self._now = 0.0  # virtual
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Of all waiting requests."""
        return self._tokens

    @property
    def max_load(self) -> float:
        """Waiting requests of the most loaded tenant, divided by its weight."""
        return max((line.load for line in self._lines.values()), default=0.0)

    def first(self, allows: Allows = _always) -> QueuedRequest | None:
        """The next request of all tenants whose own next request is allowed."""
        firsts = ((line.start, line.ranks[0][1]) for line in self._lines.values())
        allowed = [(start, key) for start, key in firsts if allows(self._waiting[key])]
        return self._waiting[min(allowed)[1]] if allowed else None

    def push(self, request: QueuedRequest) -> list[QueuedRequest] | None:
        """Add a request; the requests evicted for it, or ``None`` if there is no room for it."""
        evicted = self._room(request)
        if evicted is None:
            return None
        for other in evicted:
            self.remove(other.key)
        line = self._lines.get(request.tenant)
        if line is None:
            start = max(self._now, self._ends.pop(request.tenant, 0.0))
            line = self._lines[request.tenant] = _Line(request.weight, start)
        insort(line.ranks, (line.arrived - request.priority * PRIORITY_TOKENS, request.key))
        line.arrived += request.tokens
        line.tokens += request.tokens
        self._waiting[request.key] = request
        self._tokens += request.tokens
        return evicted

    def pop(self, allows: Allows = _always) -> QueuedRequest | None:
        """Remove and return the next request."""
        request = self.first(allows)
        if request is not None:
            line = self._lines[request.tenant]
            self._now = max(self._now, line.start)
            line.start += request.tokens / line.weight
            self.remove(request.key)
        return request

    def reset(self) -> None:
        """The queue is empty: reset every tenant's virtual time."""
        self._ends.clear()

    def remove(self, key: int) -> None:
        """Remove a request; without effect if none with this key waits."""
        request = self._waiting.pop(key, None)
        if request is None:
            return
        line = self._lines[request.tenant]
        line.ranks = [rank for rank in line.ranks if rank[1] != key]
        line.tokens -= request.tokens
        self._tokens -= request.tokens
        if not line.ranks:
            del self._lines[request.tenant]
            self._ends[request.tenant] = line.start
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}

    def ahead(self, request: QueuedRequest) -> float:
        """Estimated tokens that leave before a request that arrives now."""
        line, own = self._lines.get(request.tenant), 0
        start = max(self._now, self._ends.get(request.tenant, 0.0))
        if line is not None:
            rank = line.arrived - request.priority * PRIORITY_TOKENS
            own = sum(self._waiting[key].tokens for other, key in line.ranks if other <= rank)
            start = line.start + own / request.weight
        others = (other for other in self._lines.values() if other is not line)
        return own + sum(other.tokens_before(start) for other in others)

    def share(self, tenant: str, weight: float) -> float:
        """The tenant's part of the service rate, shared with the tenants that wait now."""
        others = sum(line.weight for name, line in self._lines.items() if name != tenant)
        return weight / (others + weight)

    def evictable(self, tenant: str, weight: float) -> QueuedRequest | None:
        """The newest request of the most loaded tenant, if ``tenant`` would still have fewer."""
        most = max(self._lines.values(), key=lambda line: line.load, default=None)
        own = self._lines.get(tenant)
        load = (len(own.ranks) + 1 if own else 1) / weight
        if most is None or most.load <= load:
            return None
        return self._waiting[most.ranks[-1][1]]

    def _room(self, request: QueuedRequest) -> list[QueuedRequest] | None:
        """The requests to evict for it; ``None`` if its tenant has no right to evict enough."""
        over = self._tokens + request.tokens - self.limit
        if over <= 0:
            return []
        left = {name: line.tokens for name, line in self._lines.items()}
        ranks = {name: list(line.ranks) for name, line in self._lines.items()}
        own = (left.get(request.tenant, 0) + request.tokens) / request.weight
        evicted: list[QueuedRequest] = []
        while over > 0:
            most = max(left, key=lambda name: left[name] / self._lines[name].weight, default=None)
            if most is None or left[most] / self._lines[most].weight <= own:
                return None
            last = self._waiting[ranks[most].pop()[1]]
            evicted.append(last)
            left[most] -= last.tokens
            over -= last.tokens
        return evicted
