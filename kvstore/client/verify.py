"""Every block of a store read back and checked: header, name, payload. It counts as a use of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvrelay.block.header import fields_of, header_bytes
from kvrelay.block.verify import verify_payload
from kvrelay.errors import Corrupt
from kvstore.base import GetResult, Store, Want
from kvstore.claims import check_name
from kvstore.client.admin import ListedBlock
from kvstore.wire.groups import size_batches

BATCH_BYTES = 32 << 20
BATCH_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class VerifiedBlock:
    """A block that was listed: right, ``error`` what is wrong with it, ``gone`` since then."""

    listed: ListedBlock
    error: Corrupt | None = None
    gone: bool = False


def verify_blocks(
    store: Store, blocks: Iterable[ListedBlock], timeout: float
) -> Iterator[VerifiedBlock]:
    """One for each block, in order; ``timeout`` is that of each call."""
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
    """Not what it was listed as: it is gone, or its length is wrong."""
    if listed.size and store.survey([listed.name], 0.0, timeout).sizes[0] is None:
        return VerifiedBlock(listed, gone=True)
    return VerifiedBlock(
        listed, Corrupt("length", f"{listed.tokens} tokens do not make {listed.size}")
    )
