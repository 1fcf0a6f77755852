"""The offline optimum: the hits of a store that knows the rest of the trace.

Belady's rule: evict the block whose next use is latest. A block is used whenever one that continues
it is, so the rule breaks no chain; of equally late blocks the deepest is evicted. As in the store
itself, room is made for all of a prompt before it is put, and every prompt is put. L. A. Belady,
"A study of replacement algorithms", IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvstore.trace.requests import TraceRequest
from kvstore.trace.simulate import ReplayResult


def optimum(trace: Sequence[TraceRequest], budget: int) -> ReplayResult:
    """The most hits that ``budget`` blocks can have on ``trace``."""
    store = _Clairvoyant(budget)
    hits = 0
    for request, again in zip(trace, _next_uses(trace), strict=True):
        hits += store.serve(request.names, again)
    return ReplayResult(sum(len(request.names) for request in trace), hits, store.evicted)


def _next_uses(trace: Sequence[TraceRequest]) -> list[list[int]]:
    """For each block of each request, the number of the next request that asks for it."""
    coming: dict[bytes, int] = {}
    uses = []
    for number in range(len(trace) - 1, -1, -1):
        names = trace[number].names
        uses.append([coming.get(name, len(trace)) for name in names])
        coming.update(dict.fromkeys(names, number))
    return uses[::-1]


class _Clairvoyant:
    """Blocks by next use; the heap has stale entries."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._again: dict[bytes, int] = {}
        self._heap: list[tuple[int, int, bytes]] = []
        self.evicted = 0

    def serve(self, names: Sequence[bytes], again: Sequence[int]) -> int:
        """Look a prompt up and put the missing blocks; returns how many led."""
        there = self._again
        lead = next((i for i, name in enumerate(names) if name not in there), len(names))
        for name in names[:lead]:
            del there[name]  # leased: not evicted
        room = self._make_room(len(names))
        for depth, name in enumerate(names[:room]):
            there[name] = again[depth]
            heapq.heappush(self._heap, (-again[depth], -depth, name))
        return lead

    def _make_room(self, wanted: int) -> int:
        while self._heap and len(self._again) + wanted > self._budget:
            use, _, name = heapq.heappop(self._heap)
            if self._again.get(name) == -use:
                del self._again[name]
                self.evicted += 1
        return min(wanted, self._budget - len(self._again))
