"""A trace of requests replayed through the store's own bookkeeping, no bytes moved.

A request looks its prompt up, holds what leads, gives it back and puts the rest, as a worker does.
Every block counts one, partial ones too, and all of a prompt is put at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.claims import Claim, ClaimStatus
from kvstore.index.block_index import BlockIndex
from kvstore.index.eviction.policy import EvictionPolicy
from kvstore.trace.requests import BLOCK_TOKENS, TraceRequest

FOREVER = 1e18


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What became of a trace: ``blocks`` asked for, ``hits`` of them found."""

    blocks: int
    hits: int
    evicted: int = 0

    @property
    def rate(self) -> float:
        """Share of blocks found; 0 of an empty trace."""
        return self.hits / self.blocks if self.blocks else 0.0


def replay(trace: Sequence[TraceRequest], budget: int, policy: EvictionPolicy) -> ReplayResult:
    """The whole trace against a new store of ``budget`` blocks."""
    catalog: BlockIndex[None] = BlockIndex(budget, policy, FOREVER, b"simulated")
    for request in trace:
        _serve(catalog, request)
    tally = catalog.tally
    return ReplayResult(sum(len(request.names) for request in trace), tally.hits, tally.evicted)


def _serve(catalog: BlockIndex[None], request: TraceRequest) -> None:
    names, now = request.names, request.at
    holding = catalog.lookup(names, [], FOREVER, now)
    if holding.lease is not None:
        catalog.release(holding.lease)
    full = request.tokens // BLOCK_TOKENS
    claims = [Claim(name, 1, depth >= full) for depth, name in enumerate(names)]
    missing = claims[holding.lead :]
    parent = names[holding.lead - 1] if holding.lead else None
    grant = catalog.reserve(missing, FOREVER, now)
    for claim, verdict in zip(missing, grant.verdicts, strict=True):
        if verdict is ClaimStatus.RESERVED and grant.ticket is not None:
            catalog.commit(grant.ticket, claim.name, None, now, parent)
        parent = claim.name


def unbounded(trace: Sequence[TraceRequest]) -> ReplayResult:
    """What a store that never evicts finds."""
    seen: set[bytes] = set()
    hits = 0
    for request in trace:
        hits += next(
            (i for i, name in enumerate(request.names) if name not in seen), len(request.names)
        )
        seen.update(request.names)
    return ReplayResult(sum(len(request.names) for request in trace), hits)
