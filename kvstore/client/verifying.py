"""Every block of a store read back and checked: header, name, payload. It counts as a use of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from common.errors import Corrupt
from kvblock.header import fields_of, header_bytes
from kvblock.verify import verify_payload
from kvstore.base import Got, Store, Want
from kvstore.book.check import check_name
from kvstore.client.admin import Listed
from kvstore.wire.groups import groups

BATCH_BYTES = 32 << 20
BATCH_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Checked:
    """A block that was listed: right, ``error`` what is wrong with it, ``gone`` since then."""

    listed: Listed
    error: Corrupt | None = None
    gone: bool = False


def checked(store: Store, blocks: Iterable[Listed], timeout: float) -> Iterator[Checked]:
    """One for each block, in order; ``timeout`` is that of each call."""
    for batch in groups(blocks, BATCH_BYTES, BATCH_BLOCKS):
        yield from _read(store, batch, timeout)


def _read(store: Store, batch: Sequence[Listed], timeout: float) -> Iterator[Checked]:
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
            yield Checked(listed, error)
        else:
            yield Checked(listed)


def _check(listed: Listed, want: Want, got: Got) -> None:
    header = fields_of(got.header or b"")
    check_name(listed.name, header)
    verify_payload(header, want.buffer, got.summed)


def _absent(store: Store, listed: Listed, timeout: float) -> Checked:
    """Not what it was listed as: it is gone, or its length is wrong."""
    if listed.size and store.survey([listed.name], 0.0, timeout).sizes[0] is None:
        return Checked(listed, gone=True)
    return Checked(listed, Corrupt("length", f"{listed.tokens} tokens do not make {listed.size}"))
