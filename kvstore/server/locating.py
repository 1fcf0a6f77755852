"""The answers to ``Locate`` and ``Reserve``, the same on whichever way they were asked."""

from __future__ import annotations

from kvrelay.errors import Rejected
from kvrelay.v1 import store_pb2 as pb
from kvstore.claims import Grant
from kvstore.limits import MAX_LEASE_MS, MAX_NAMES
from kvstore.server.block_store import BlockStore
from kvstore.server.tenants import OPEN_SCOPE, TenantScope
from kvstore.wire.messages import VERDICTS, checked_names

DISK_LOAD_SECONDS = 5.0
"""A block that does not come from disk in so long is absent."""


def locate_response(
    store: BlockStore, request: pb.LocateRequest, scope: TenantScope = OPEN_SCOPE
) -> pb.LocateResponse:
    """Where the names asked for lie, and a lease on them."""
    names = checked_names("names", request.names, MAX_NAMES)
    if not 0 < request.lease_ms <= MAX_LEASE_MS:
        raise Rejected("lease_ms", f"{request.lease_ms} is not in 1 .. {MAX_LEASE_MS}")
    found = store.locate(scope.keys(names), request.lease_ms / 1000)
    return pb.LocateResponse(
        boot=store.boot,
        lengths=[0 if block is None else block[0] for block in found.blocks],
        offsets=[0 if block is None else block[1] for block in found.blocks],
        lease=found.lease.id if found.lease else 0,
        lease_ms=request.lease_ms if found.lease else 0,
        proof=b"" if found.lease is None else store.token(found.lease.id),
    )


def reserve_response(store: BlockStore, grant: Grant) -> pb.ReserveResponse:
    """What was granted, and a token for its ticket."""
    return pb.ReserveResponse(
        boot=store.boot,
        ticket=grant.ticket or 0,
        verdicts=[VERDICTS[verdict] for verdict in grant.verdicts],
        ticket_ms=round(store.limits.ticket_life * 1000),
        proof=b"" if grant.ticket is None else store.token(grant.ticket),
    )
