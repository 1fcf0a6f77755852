"""A queue that is fair to tenants, counted in tokens. Pure; nobody waits here, it only says who is
next.

Start-time fair queueing (Goyal, Vin, Cheng 1996): each tenant has a virtual time that grows by
tokens / weight with every request of it that goes; the one with the least goes next. Two tenants
that both have requests waiting never differ by more than one request of each. Inside a tenant a
priority is worth a fixed number of tokens: a request is overtaken by those of higher priority that
come within so many tokens after it, and by no others. So nobody starves.

When it is full, a tenant that has less than its share pushes out the last request of the one that
has the most for its weight.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field

LOWEST, HIGHEST = -8, 8
STEP = 4096  # tokens that a step of priority is worth


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """One request. ``key`` is its own; ``tokens`` is all it can come to, ``until`` its deadline,
    ``part`` of its answer is still to be made; it came with ``patience`` seconds."""

    key: int
    tokens: int
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    until: float = math.inf
    part: float = 1.0
    patience: float = math.inf

    @property
    def kind(self) -> int:
        """Those of one kind are as patient, about: what they ask for takes as long, about."""
        return math.frexp(self.patience)[1]


@dataclass(slots=True)
class _Line:
    """A tenant with requests waiting: (rank, key) in order."""

    weight: float
    start: float
    ranks: list[tuple[int, int]] = field(default_factory=list)
    tokens: int = 0
    came: int = 0

    def until(self, start: float) -> float:
        """Tokens of those that begin before a virtual time, about: one does at its own."""
        if start < self.start:
            return 0.0
        one = self.tokens / len(self.ranks)
        return min(float(self.tokens), (start - self.start) * self.weight + one)


class FairQueue:
    """At most ``limit`` tokens wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[int, QueuedRequest] = {}
        self._lines: dict[str, _Line] = {}
        self._ends: dict[str, float] = {}  # virtual time of tenants that have nothing waiting
        self._now = 0.0  # virtual
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Of all that wait."""
        return self._tokens

    def push(self, waiting: QueuedRequest) -> list[QueuedRequest] | None:
        """Take one in; those pushed out for it, or ``None`` when there is no room for it."""
        out = self._room(waiting)
        if out is None:
            return None
        for one in out:
            self.remove(one.key)
        line = self._lines.get(waiting.tenant)
        if line is None:
            start = max(self._now, self._ends.pop(waiting.tenant, 0.0))
            line = self._lines[waiting.tenant] = _Line(waiting.weight, start)
        insort(line.ranks, (line.came - waiting.priority * STEP, waiting.key))
        line.came += waiting.tokens
        self._waiting[waiting.key] = waiting
        line.tokens += waiting.tokens
        self._tokens += waiting.tokens
        return out

    @property
    def first(self) -> QueuedRequest | None:
        """Whoever is next."""
        if not self._lines:
            return None
        line = min(self._lines.values(), key=lambda line: (line.start, line.ranks[0][1]))
        return self._waiting[line.ranks[0][1]]

    def pop(self) -> QueuedRequest | None:
        """Take out whoever is next."""
        waiting = self.first
        if waiting is not None:
            line = self._lines[waiting.tenant]
            self._now = line.start
            line.start += waiting.tokens / line.weight
            self.remove(waiting.key)
        return waiting

    def forgive(self) -> None:
        """There is room for all: who had more than others in a crowd owes nobody anything."""
        self._ends.clear()

    def remove(self, key: int) -> None:
        """It does not wait any more; without effect on one that does not."""
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return
        line = self._lines[waiting.tenant]
        line.ranks = [rank for rank in line.ranks if rank[1] != key]
        line.tokens -= waiting.tokens
        self._tokens -= waiting.tokens
        if not line.ranks:
            del self._lines[waiting.tenant]
            self._ends[waiting.tenant] = line.start
            self._forget()

    def ahead(self, waiting: QueuedRequest) -> float:
        """Tokens that go before one that came now, about."""
        line, own = self._lines.get(waiting.tenant), 0
        start = max(self._now, self._ends.get(waiting.tenant, 0.0))
        if line is not None:
            rank = line.came - waiting.priority * STEP
            own = sum(self._waiting[key].tokens for other, key in line.ranks if other <= rank)
            start = line.start + own / waiting.weight
        others = (other for other in self._lines.values() if other is not line)
        return own + sum(other.until(start) for other in others)

    def share(self, tenant: str, weight: float) -> float:
        """The part of what drains that is a tenant's, beside those that wait now."""
        every = sum(line.weight for name, line in self._lines.items() if name != tenant)
        return weight / (every + weight)

    @property
    def crowd(self) -> float:
        """The most requests that any tenant has, for its weight."""
        return max(map(self._crowd, self._lines), default=0.0)

    def crowded(self, tenant: str, weight: float) -> QueuedRequest | None:
        """The last of whoever has most requests for its weight, if ``tenant`` would have fewer."""
        most = max(self._lines, key=lambda name: self._crowd(name), default=None)
        own = self._lines.get(tenant)
        if most is None or self._crowd(most) <= (len(own.ranks) + 1 if own else 1) / weight:
            return None
        return self._waiting[self._lines[most].ranks[-1][1]]

    def _crowd(self, tenant: str) -> float:
        line = self._lines[tenant]
        return len(line.ranks) / line.weight

    def _room(self, waiting: QueuedRequest) -> list[QueuedRequest] | None:
        over = self._tokens + waiting.tokens - self._limit
        if over <= 0:
            return []
        left = {name: line.tokens for name, line in self._lines.items()}
        lasts = {name: list(line.ranks) for name, line in self._lines.items()}
        own = (left.get(waiting.tenant, 0) + waiting.tokens) / waiting.weight
        out: list[QueuedRequest] = []
        while over > 0:
            most = max(left, key=lambda name: left[name] / self._lines[name].weight, default=None)
            if most is None or left[most] / self._lines[most].weight <= own:
                return None
            last = self._waiting[lasts[most].pop()[1]]
            out.append(last)
            left[most] -= last.tokens
            over -= last.tokens
        return out

    def _forget(self) -> None:
        """Whose virtual time has passed is like one that never came."""
        self._ends = {name: end for name, end in self._ends.items() if end > self._now}
