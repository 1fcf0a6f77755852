"""Response messages of the store: the same on gRPC and on the socket transport."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from kvrelay.errors import NotFound, Rejected
from kvrelay.rpc.security.identity import Caller, CallerKind
from kvrelay.v1 import store_pb2 as pb
from kvstore.claims import Grant, name_of
from kvstore.disk.tier import DiskTier
from kvstore.index.entries import IndexEntry
from kvstore.limits import MAX_LEASE_MS, MAX_NAMES
from kvstore.server.block_store import BlockStore
from kvstore.server.tenants import OPEN_SCOPE, TenantScope
from kvstore.wire.messages import VERDICTS, checked_names, stats_message

PAGE = 1000
"""Blocks in one message: about a millisecond of the event loop."""

DISK_LOAD_SECONDS = 5.0
"""A block whose load from disk takes longer counts as absent."""


def locate_response(
    store: BlockStore, request: pb.LocateRequest, scope: TenantScope = OPEN_SCOPE
) -> pb.LocateResponse:
    """The offsets of the requested blocks in the arena, and a lease on them."""
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
        proof=b"" if found.lease is None else store.proof(found.lease.id),
    )


def reserve_response(store: BlockStore, grant: Grant) -> pb.ReserveResponse:
    """The verdicts of a grant, and a proof for its ticket."""
    return pb.ReserveResponse(
        boot=store.boot,
        ticket=grant.ticket or 0,
        verdicts=[VERDICTS[verdict] for verdict in grant.verdicts],
        ticket_ms=round(store.limits.ticket_life * 1000),
        proof=b"" if grant.ticket is None else store.proof(grant.ticket),
    )


def snapshot_matching(store: BlockStore, prefix: bytes) -> tuple[int, list[IndexEntry[int]]]:
    """``BlockStore.snapshot`` of names that begin with ``prefix``. Slow for many blocks."""
    last, entries = store.snapshot()
    if prefix:
        entries = [entry for entry in entries if name_of(entry.name).startswith(prefix)]
    return last, entries


def list_responses(
    store: BlockStore, last: int, entries: list[IndexEntry[int]], limit: int
) -> Iterator[pb.ListResponse]:
    """The pages of a ``List``, at least one."""
    for page in info_pages(store, islice(entries, limit or None)):
        yield pb.ListResponse(boot=store.boot, sequence=last, blocks=page)


def info_pages(
    store: BlockStore, entries: Iterator[IndexEntry[int]]
) -> Iterator[list[pb.BlockInfo]]:
    """The blocks page by page; the last page is not full, and may be empty."""
    while True:
        page = [block_info(store, entry) for entry in islice(entries, PAGE)]
        yield page
        if len(page) < PAGE:
            return


def inspect_response(store: BlockStore, disk: DiskTier | None, name: bytes) -> pb.InspectResponse:
    """One block and its header; ``NotFound`` if it is absent. May read from disk."""
    found = store.inspect(name)
    entry, header = found or (None, b"")
    if entry is not None and not header and disk is not None:
        header = disk.header(name)
    if entry is None or not header:
        raise NotFound(f"there is no block {name_of(name).hex()}")
    return pb.InspectResponse(boot=store.boot, block=block_info(store, entry), header=header)


def stats_response(store: BlockStore, caller: Caller) -> pb.GetStatsResponse:
    """The figures of the store; admins get each tenant's too, a tenant gets its own alone."""
    rows = [
        pb.TenantStats(name=one.name, quota=one.quota, entries=one.entries, bytes=one.bytes)
        for one in store.tenant_stats()
    ]
    if caller.tenant.name:
        mine = [row for row in rows if row.name == caller.tenant.name]
        return pb.GetStatsResponse(boot=store.boot, tenants=mine)
    message = stats_message(store.stats())
    if caller.kind is CallerKind.ADMIN:
        message.tenants.extend(rows)
    return message


def block_info(store: BlockStore, entry: IndexEntry[int]) -> pb.BlockInfo:
    """The message that describes one block."""
    return pb.BlockInfo(
        name=name_of(entry.name),
        tenant=store.tenants.title(entry.name),
        length=entry.size,
        tokens=entry.tokens,
        partial=entry.partial,
        leases=entry.leases,
        memory=entry.ready,
        disk=store.on_disk(entry.name),
    )
