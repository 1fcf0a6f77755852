"""The answers to ``List`` and ``Inspect``: what those see who look after the store."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from common.errors import NotFound
from kvstore.entries import Entry
from kvstore.vault import Vault
from protos import kvstore_pb2 as pb

PAGE = 1000
"""Blocks in one message: about a millisecond of the event loop."""


def pages(vault: Vault, prefix: bytes, limit: int) -> Iterator[pb.ListResponse]:
    """What is there now, whose names begin with ``prefix``; one page at least."""
    last, entries = vault.snapshot()
    wanted = (entry for entry in entries if entry.name.startswith(prefix))
    for page in paged(islice(wanted, limit or None)):
        yield pb.ListResponse(boot=vault.boot, sequence=last, blocks=page)


def paged(entries: Iterator[Entry[int]]) -> Iterator[list[pb.BlockInfo]]:
    """In messages; the last one is not full, and may be empty."""
    while True:
        page = [info_of(entry) for entry in islice(entries, PAGE)]
        yield page
        if len(page) < PAGE:
            return


def inspected(vault: Vault, name: bytes) -> pb.InspectResponse:
    """One block; ``NotFound`` if it is not there."""
    found = vault.inspect(name)
    if found is None:
        raise NotFound(f"there is no block {name.hex()}")
    entry, header = found
    return pb.InspectResponse(boot=vault.boot, block=info_of(entry), header=header)


def info_of(entry: Entry[int]) -> pb.BlockInfo:
    """For the wire."""
    return pb.BlockInfo(
        name=entry.name,
        length=entry.size,
        tokens=entry.tokens,
        partial=entry.partial,
        leases=entry.leases,
        memory=True,
    )
