"""The answers to ``List`` and ``Inspect``: what those see who look after the store."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from kvrelay.errors import NotFound
from kvrelay.rpc.security.identity import Caller, CallerKind
from kvrelay.v1 import store_pb2 as pb
from kvstore.claims import name_of
from kvstore.disk.tier import DiskTier
from kvstore.index.entries import IndexEntry
from kvstore.server.block_store import BlockStore
from kvstore.wire.messages import stats_message

PAGE = 1000
"""Blocks in one message: about a millisecond of the event loop."""


def snapshot_matching(store: BlockStore, prefix: bytes) -> tuple[int, list[IndexEntry[int]]]:
    """``BlockStore.snapshot`` of names that begin with ``prefix``. Slow for many blocks."""
    last, entries = store.snapshot()
    if prefix:
        entries = [entry for entry in entries if name_of(entry.name).startswith(prefix)]
    return last, entries


def list_responses(
    store: BlockStore, last: int, entries: list[IndexEntry[int]], limit: int
) -> Iterator[pb.ListResponse]:
    """One page at least."""
    for page in info_pages(store, islice(entries, limit or None)):
        yield pb.ListResponse(boot=store.boot, sequence=last, blocks=page)


def info_pages(
    store: BlockStore, entries: Iterator[IndexEntry[int]]
) -> Iterator[list[pb.BlockInfo]]:
    """In messages; the last one is not full, and may be empty."""
    while True:
        page = [block_info(store, entry) for entry in islice(entries, PAGE)]
        yield page
        if len(page) < PAGE:
            return


def inspect_response(store: BlockStore, disk: DiskTier | None, name: bytes) -> pb.InspectResponse:
    """One block; ``NotFound`` if it is not there. May read from disk."""
    found = store.inspect(name)
    entry, header = found or (None, b"")
    if entry is not None and not header and disk is not None:
        header = disk.header(name)
    if entry is None or not header:
        raise NotFound(f"there is no block {name_of(name).hex()}")
    return pb.InspectResponse(boot=store.boot, block=block_info(store, entry), header=header)


def stats_response(store: BlockStore, caller: Caller) -> pb.GetStatsResponse:
    """Of the whole store, and of each tenant for admins; of itself alone for a tenant."""
    rows = [
        pb.TenantStats(name=owner.name, quota=owner.quota, entries=entries, bytes=size)
        for owner, entries, size in (store.usage() if store.tenants.owners else ())
    ]
    if caller.tenant.name:
        mine = [row for row in rows if row.name == caller.tenant.name]
        return pb.GetStatsResponse(boot=store.boot, tenants=mine)
    message = stats_message(store.stats())
    if caller.kind is CallerKind.ADMIN:
        message.tenants.extend(rows)
    return message


def block_info(store: BlockStore, entry: IndexEntry[int]) -> pb.BlockInfo:
    """For the wire."""
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
