"""A simulated fleet: prefill workers with a pool and a queue, decode workers with streams, a store.

The clock is simulated and the router's own policies and affinity choose. A prefill worker computes
one prompt after another, at a rate; what the store holds is fetched at another. Nothing is random
but what a policy draws.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.policies import PlacementPolicy
from router.placement.affinity import Affinity
from router.placement.placer import STORE, STORED
from router.placement.policy import DECODE, PREFILL, LegDemand, Prefix
from router.workers.candidate import Candidate

BLOCK = 512  # tokens, as in the trace
LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class FleetShape:
    """Rates in tokens a second, capacities in blocks."""

    prefill: int = 8
    decode: int = 8
    compute: float = 6000.0
    fetch: float = 50_000.0
    token_seconds: float = 0.03
    pool: int = 1000
    store: int = 20_000


@dataclass(frozen=True, slots=True)
class FleetRequest:
    """One line of the trace."""

    at: float
    tokens: int
    outputs: int
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The outcome of a request: seconds in the queue and to the first token; tokens by source."""

    worker: int
    queue: float
    first_token: float
    local: int
    fetched: int
    computed: int


class Cache:
    """Names of blocks, the least recently used evicted first, ends of chains before heads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def leading(self, names: Sequence[bytes]) -> int:
        """How many in a row are here."""
        return next((i for i, name in enumerate(names) if name not in self._held), len(names))

    def keep(self, names: Sequence[bytes]) -> None:
        """All of these were used just now."""
        for name in reversed(names):
            self._held[name] = None
            self._held.move_to_end(name)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)


@dataclass(slots=True)
class Machine:
    """A worker. ``ends`` are (time, tokens) of what is in flight there."""

    pool: Cache
    free_at: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)

    def candidate(self, key: str, now: float, pool: int) -> Candidate:
        """As the router would see it."""
        while self.ends and self.ends[0][0] <= now:
            heapq.heappop(self.ends)
        tokens = sum(count for _, count in self.ends)
        return Candidate(key, len(self.ends), tokens, LONGEST, pool * BLOCK)


class Fleet:
    """One run of a trace under one policy for each role."""

    def __init__(
        self, shape: FleetShape, prefill: PlacementPolicy, decode: PlacementPolicy
    ) -> None:
        self._shape = shape
        self._policies = (prefill, decode)
        self._prefill = [Machine(Cache(shape.pool)) for _ in range(shape.prefill)]
        self._decode = [Machine(Cache(shape.pool)) for _ in range(shape.decode)]
        self._store = Cache(shape.store)
        self._known = Affinity(), Affinity()
        self._stored = Affinity()
        self.streams = [0.0] * shape.decode  # seconds of streams by decode worker

    def serve(self, asked: FleetRequest) -> FleetResult:
        """Place and run one request; they come in the order of their time."""
        at, work = self._choose(0, self._prefill, asked)
        believed = self._believed(asked)
        served = self._compute(at, work, asked)
        if served.local + served.fetched + BLOCK < believed:
            self._stored.forget_half(STORE)
        self._stored.record(asked.names, STORE, STORED)
        at, work = self._choose(1, self._decode, asked)
        self._stream(at, work, asked, asked.at + served.first_token)
        return served

    def _choose(self, role: int, machines: list[Machine], asked: FleetRequest) -> tuple[int, int]:
        pool = self._shape.pool
        candidates = [m.candidate(str(i), asked.at, pool) for i, m in enumerate(machines)]
        demand = LegDemand(
            tokens=asked.tokens,
            positions=1,
            prefix=Prefix(asked.names, BLOCK),
            weights=(PREFILL, DECODE)[role],
            stored=self._believed(asked),
        )
        leading = self._known[role].leading(asked.names)
        choice = self._policies[role].choose(demand, candidates, leading)
        if choice is None:
            raise ValueError("a fleet without workers")
        self._known[role].record(asked.names, choice.key, pool)
        return int(choice.key), choice.work

    def _believed(self, asked: FleetRequest) -> int:
        """Leading tokens that the store is thought to hold: as the router learns it."""
        if not self._shape.store:
            return 0
        return self._stored.leading(asked.names).get(STORE, 0) * BLOCK

    def _compute(self, index: int, work: int, asked: FleetRequest) -> FleetResult:
        shape, machine = self._shape, self._prefill[index]
        local = min(machine.pool.leading(asked.names) * BLOCK, asked.tokens - 1)
        stored = min(self._store.leading(asked.names) * BLOCK, asked.tokens - 1)
        fetched = max(0, stored - local)
        computed = asked.tokens - local - fetched
        begin = max(asked.at, machine.free_at)
        machine.free_at = begin + fetched / shape.fetch + computed / shape.compute
        heapq.heappush(machine.ends, (machine.free_at, work))
        machine.pool.keep(asked.names)
        self._store.keep(asked.names)
        first = machine.free_at - asked.at
        return FleetResult(index, begin - asked.at, first, local, fetched, computed)

    def _stream(self, index: int, work: int, asked: FleetRequest, begin: float) -> None:
        machine, seconds = self._decode[index], asked.outputs * self._shape.token_seconds
        heapq.heappush(machine.ends, (begin + seconds, work))
        machine.pool.keep(asked.names)
        self.streams[index] += seconds
