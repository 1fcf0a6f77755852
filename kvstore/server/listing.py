"""The answers to ``List`` and ``Inspect``: what those see who look after the store."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from common.errors import NotFound
from kvstore.book.entries import Entry
from kvstore.book.keys import name_of
from kvstore.disk.tier import DiskTier
from kvstore.messages import stats_message
from kvstore.server.vault import Vault
from protos import kvstore_pb2 as pb
from rpc.identity import Identity, Kind

PAGE = 1000
"""Blocks in one message: about a millisecond of the event loop."""


def listed(vault: Vault, prefix: bytes) -> tuple[int, list[Entry[int]]]:
    """``Vault.snapshot``, of names that begin with ``prefix``. Of many blocks it takes a while."""
    last, entries = vault.snapshot()
    if prefix:
        entries = [entry for entry in entries if name_of(entry.name).startswith(prefix)]
    return last, entries


def pages(
    vault: Vault, last: int, entries: list[Entry[int]], limit: int
) -> Iterator[pb.ListResponse]:
    """One page at least."""
    for page in paged(vault, islice(entries, limit or None)):
        yield pb.ListResponse(boot=vault.boot, sequence=last, blocks=page)


def paged(vault: Vault, entries: Iterator[Entry[int]]) -> Iterator[list[pb.BlockInfo]]:
    """In messages; the last one is not full, and may be empty."""
    while True:
        page = [info_of(vault, entry) for entry in islice(entries, PAGE)]
        yield page
        if len(page) < PAGE:
            return


def inspected(vault: Vault, disk: DiskTier | None, name: bytes) -> pb.InspectResponse:
    """One block; ``NotFound`` if it is not there. May read from disk."""
    found = vault.inspect(name)
    entry, header = found or (None, b"")
    if entry is not None and not header and disk is not None:
        header = disk.header(name)
    if entry is None or not header:
        raise NotFound(f"there is no block {name_of(name).hex()}")
    return pb.InspectResponse(boot=vault.boot, block=info_of(vault, entry), header=header)


def stats_for(vault: Vault, caller: Identity) -> pb.StatsResponse:
    """Of the whole store, and of each tenant for admins; of itself alone for a tenant."""
    rows = [
        pb.TenantStats(name=owner.name, quota=owner.quota, entries=entries, bytes=size)
        for owner, entries, size in (vault.usage() if vault.tenants.owners else ())
    ]
    if caller.tenant.name:
        mine = [row for row in rows if row.name == caller.tenant.name]
        return pb.StatsResponse(boot=vault.boot, tenants=mine)
    message = stats_message(vault.stats())
    if caller.kind is Kind.ADMIN:
        message.tenants.extend(rows)
    return message


def info_of(vault: Vault, entry: Entry[int]) -> pb.BlockInfo:
    """For the wire."""
    return pb.BlockInfo(
        name=name_of(entry.name),
        tenant=vault.tenants.title(entry.name),
        length=entry.size,
        tokens=entry.tokens,
        partial=entry.partial,
        leases=entry.leases,
        memory=entry.ready,
        disk=vault.on_disk(entry.name),
    )
