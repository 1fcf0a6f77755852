"""What hints are worth on a recorded trace: see ``benchmarks.evict --hints``.

The trace says when a prompt is served. Assumed is what the trace does not have: that each prompt
had waited in the router's queue for some seconds, told to the store as the router tells it; and
that a client knew whether its next prompt would come within a horizon, and said so ("a tool runs",
else "the turn ends"), a second after each prompt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore.index.eviction import make_policy
from kvstore.index.eviction.hints import Hint
from kvstore.limits import RETURNS
from kvstore.trace.requests import BLOCK_TOKENS, TraceRequest
from kvstore.trace.simulate import new_index, serve
from router.queue.hints import MIN_WAIT, RENEW, SETTLE, TURN_LIFE


@dataclass(frozen=True, slots=True)
class Assumed:
    """Seconds: how long every prompt waits, and what a client knows of its next one.

    ``horizon`` 0: clients say nothing; ``math.inf``: each says that the turn ends, knowing nothing.
    """

    wait: float = 0.0
    horizon: float = 0.0

    def __str__(self) -> str:
        told = []
        if self.wait:
            told.append(f"queue of {self.wait:g} s")
        if self.horizon == math.inf:
            told.append("every turn ends")
        elif self.horizon:
            told.append(f"clients know {self.horizon:g} s")
        return ", ".join(told)


def hinted_rate(trace: Sequence[TraceRequest], budget: int, assumed: Assumed) -> float:
    """The hit rate of ``returns`` with hints, in a store of ``budget`` blocks."""
    index = new_index(budget, make_policy(RETURNS))
    coming = deque(trace) if assumed.wait else deque()
    waiting: deque[tuple[float, TraceRequest]] = deque()  # by when it is told next
    said: deque[tuple[float, Hint]] = deque()
    for request, again in zip(trace, _next_prompts(trace), strict=True):
        now = request.at
        while coming and coming[0].at - assumed.wait + MIN_WAIT <= now:
            waiting.append((coming[0].at - assumed.wait + MIN_WAIT, coming.popleft()))
        hints = list(_due(waiting, now))
        while said and said[0][0] <= now:
            hints.append(said.popleft()[1])
        if hints:
            index.hint(hints, now)
        serve(index, request)
        if assumed.horizon:
            said.append((now + SETTLE, _client(request, again, assumed.horizon)))
    return index.counters.hits / sum(len(request.names) for request in trace)


def _due(waiting: deque[tuple[float, TraceRequest]], now: float) -> Iterator[Hint]:
    """The hints for prompts that wait and were not told of lately."""
    for _ in range(len(waiting)):
        due, request = waiting.popleft()
        if request.at <= now:
            continue  # it is served
        if due <= now:
            due = now + RENEW
            yield _soon(request.names, 2 * RENEW)
        waiting.append((due, request))


def _client(request: TraceRequest, again: float, horizon: float) -> Hint:
    names = request.names[: request.tokens // BLOCK_TOKENS]
    if again - request.at <= horizon < math.inf:
        return _soon(names, horizon)
    return Hint(request.names, False, TURN_LIFE, "", 1 << 62)


def _soon(names: Sequence[bytes], life: float) -> Hint:
    return Hint(names, True, life, "", 1 << 62)


def _next_prompts(trace: Sequence[TraceRequest]) -> list[float]:
    """For each request the time of the next one that has its last full block."""
    coming: dict[bytes, float] = {}
    times = []
    for request in reversed(trace):
        full = min(request.tokens // BLOCK_TOKENS, len(request.names))
        last = request.names[max(full, 1) - 1 : max(full, 1)]
        times.append(coming.get(last[0], math.inf) if last else math.inf)
        coming.update(dict.fromkeys(request.names, request.at))
    return times[::-1]
