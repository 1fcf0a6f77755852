"""Reads every block of a store back and checks header, name and payload. A read counts as a use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

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
    """A listed block: correct, or ``error`` says what is wrong, or it was ``removed`` since."""

    listed: ListedBlock
    error: Corrupt | None = None
    removed: bool = False


def verify_blocks(
    store: Store, blocks: Iterable[ListedBlock], timeout: float
) -> Iterator[VerifiedBlock]:
    """One result for each block, in order; ``timeout`` is that of each call to the store."""
    for batch in size_batches(blocks, BATCH_BYTES, BATCH_BLOCKS):
        yield from _read(store, batch, timeout)


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
