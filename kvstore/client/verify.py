"""Reads every block of a store back and checks header, name and payload. A read counts as a use.

A store removes a block at which a reader stops, if the block is wrong: so a repair needs no call of
its own and works with every kind of store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from kvrelay.block.header import fields_of, header_bytes
from kvrelay.block.verify import verify_payload
from kvrelay.errors import Corrupt
from kvstore.base import GetResult, ListedBlock, NameQuery, Store, Want
from kvstore.claims import check_name
from kvstore.wire.buffers import size_batches

BATCH_BYTES = 32 << 20
BATCH_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class VerifiedBlock:
    """A listed block: correct, or with an ``error``; ``removed``: it is no longer stored."""

    listed: ListedBlock
    error: Corrupt | None = None
    removed: bool = False


def verify_blocks(
    store: Store, blocks: Iterable[ListedBlock], timeout: float, repair: bool = False
) -> Iterator[VerifiedBlock]:
    """One result for each block, in order; ``timeout`` is that of each call to the store.

    ``repair``: remove wrong blocks, so that right ones may be put in their place.
    """
    for batch in size_batches(blocks, BATCH_BYTES, BATCH_BLOCKS):
        for found in _read(store, batch, timeout):
            wrong = repair and found.error is not None
            yield replace(found, removed=_remove(store, found, timeout)) if wrong else found


def _remove(store: Store, found: VerifiedBlock, timeout: float) -> bool:
    """Stop reading at a wrong block; returns whether the store has removed it."""
    listed = found.listed
    payload = max(listed.size - header_bytes(listed.tokens), 0)
    want = Want(listed.name, memoryview(bytearray(payload)))
    with closing(store.get([want], timeout)) as arriving:
        next(arriving, None)
    return store.survey(NameQuery([listed.name]), timeout).sizes[0] is None


def _read(store: Store, batch: Sequence[ListedBlock], timeout: float) -> Iterator[VerifiedBlock]:
    sized = {b.name: b.size - header_bytes(b.tokens) for b in batch}
    wants = [Want(b.name, memoryview(bytearray(max(sized[b.name], 0)))) for b in batch]
    for got in store.get(wants, timeout):
        listed = batch[got.index]
        if got.header is None:
            yield _absent(store, listed, timeout)
            continue
        try:
            _check(listed, wants[got.index], got)
        except Corrupt as error:
            yield VerifiedBlock(listed, error)
        else:
            yield VerifiedBlock(listed)


def _check(listed: ListedBlock, want: Want, got: GetResult) -> None:
    header = fields_of(got.header or b"")
    check_name(listed.name, header)
    verify_payload(header, want.buffer, got.summed)


def _absent(store: Store, listed: ListedBlock, timeout: float) -> VerifiedBlock:
    """A block that was not read: it was removed, or its length is wrong."""
    if listed.size and store.survey(NameQuery([listed.name]), timeout).sizes[0] is None:
        return VerifiedBlock(listed, removed=True)
    return VerifiedBlock(
        listed, Corrupt("length", f"{listed.tokens} tokens do not make {listed.size}")
    )
