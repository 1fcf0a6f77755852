"""Replays a trace of requests through the store's own index; no bytes are moved.

A request looks its prompt up, holds the blocks found, releases them and puts the rest, as a worker
does. Every block has size one, partial ones too, and all of a prompt is put at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.base import PutStatus
from kvstore.claims import Claim
from kvstore.index.block_index import BlockIndex, IndexOptions
from kvstore.index.eviction.policy import EvictionPolicy
from kvstore.trace.requests import BLOCK_TOKENS, TraceRequest

FOREVER = 1e18


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result for a trace: ``blocks`` asked for, ``hits`` of them found."""

    blocks: int
    hits: int
    evicted: int = 0

    @property
    def rate(self) -> float:
        """The share of blocks found; 0 for an empty trace."""
        return self.hits / self.blocks if self.blocks else 0.0


def replay(trace: Sequence[TraceRequest], budget: int, policy: EvictionPolicy) -> ReplayResult:
    """Replay the whole trace against a new store of ``budget`` blocks."""
    index = new_index(budget, policy)
    for request in trace:
        serve(index, request)
    counters = index.counters
    return ReplayResult(
        sum(len(request.names) for request in trace), counters.hits, counters.evicted
    )


def new_index(budget: int, policy: EvictionPolicy) -> BlockIndex[None]:
    """An index of ``budget`` blocks."""
    return BlockIndex(IndexOptions(budget, FOREVER, b"simulated"), policy)


def serve(index: BlockIndex[None], request: TraceRequest) -> None:
    """Look a prompt up and put what is missing."""
    names, now = request.names, request.at
    holding = index.lookup(names, [], FOREVER, now)
    if holding.lease is not None:
        index.release(holding.lease.id)
    full = request.tokens // BLOCK_TOKENS
    parents = [None, *names]
    claims = [
        Claim(name, 1, depth >= full, parent=parent)
        for depth, (name, parent) in enumerate(zip(names, parents, strict=False))
    ]
    missing = claims[holding.lead :]
    grant = index.reserve(missing, FOREVER, now)
    for claim, verdict in zip(missing, grant.verdicts, strict=True):
        if verdict is PutStatus.RESERVED and grant.ticket is not None:
            index.commit(grant.ticket, claim.name, None, now, claim.parent)


def unbounded(trace: Sequence[TraceRequest]) -> ReplayResult:
    """The hits of a store that never evicts."""
    seen: set[bytes] = set()
    hits = 0
    for request in trace:
        hits += next(
            (i for i, name in enumerate(request.names) if name not in seen), len(request.names)
        )
        seen.update(request.names)
    return ReplayResult(sum(len(request.names) for request in trace), hits)
