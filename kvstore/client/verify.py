"""Reads every block of a store back and checks header, name, payload and the fleet's tag.

A read counts as a use.

A store removes a block at which a reader stops, if the block is wrong: so a repair needs no call of
its own and works with every kind of store. A ``kvrelay://`` store knows a wrong tag if it has the
fleet's key itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvrelay.block.header import SHORTEST, fields_of, stated_length
from kvrelay.block.verify import verify_payload, verify_tag
from kvrelay.errors import Corrupt
from kvrelay.usage import Miss
from kvstore.base import GetResult, ListedBlock, NameQuery, Store, Want
from kvstore.claims import check_name
from kvstore.wire.buffers import size_batches

if TYPE_CHECKING:
    from kvrelay.block.mac import BlockKey

BATCH_BYTES = 32 << 20
BATCH_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class VerifiedBlock:
    """A listed block: correct, or with an ``error``; ``removed``: it is no longer stored."""

    listed: ListedBlock
    error: Corrupt | None = None
    removed: bool = False

    @property
    def wrong_tag(self) -> bool:
        """Whether it is whole, and was not written by this fleet."""
        return self.error is not None and self.error.field == "tag"


def verify_blocks(
    store: Store,
    blocks: Iterable[ListedBlock],
    timeout: float,
    repair: bool = False,
    key: BlockKey | None = None,
) -> Iterator[VerifiedBlock]:
    """One result for each block, in order; ``timeout`` is that of each call to the store.

    ``repair``: remove wrong blocks, so that right ones may be put in their place. With ``key``, a
    block that it did not sign is wrong; blocks of tenants are not signed.
    """
    for batch in size_batches(blocks, BATCH_BYTES, BATCH_BLOCKS):
        for found in _read(store, batch, timeout, key):
            wrong = repair and found.error is not None
            yield replace(found, removed=_remove(store, found, timeout, key)) if wrong else found


def _remove(store: Store, found: VerifiedBlock, timeout: float, key: BlockKey | None) -> bool:
    """Stop reading at a wrong block; returns whether the store has removed it."""
    listed = found.listed
    want = _want(listed, None if listed.tenant else key)
    with closing(store.get([want], timeout)) as arriving:
        next(arriving, None)
    return store.survey(NameQuery([listed.name]), timeout).sizes[0] is None


def _read(
    store: Store, batch: Sequence[ListedBlock], timeout: float, key: BlockKey | None
) -> Iterator[VerifiedBlock]:
    wants = [_want(listed) for listed in batch]
    for got in store.get(wants, timeout):
        listed = batch[got.index]
        if not got.header:
            yield _absent(store, listed, timeout)
            continue
        try:
            _check(listed, wants[got.index], got, None if listed.tenant else key)
        except Corrupt as error:
            yield VerifiedBlock(listed, error)
        else:
            yield VerifiedBlock(listed)


def _want(listed: ListedBlock, key: BlockKey | None = None) -> Want:
    """The list does not say how many heads a block has: its header may end in the buffer."""
    return Want(listed.name, memoryview(bytearray(max(listed.size - SHORTEST, 0))), key=key)


def _check(listed: ListedBlock, want: Want, got: GetResult, key: BlockKey | None) -> None:
    begun = got.header or b""
    rest = max(stated_length(begun) - len(begun), 0)
    raw, payload = begun + want.buffer[:rest], want.buffer[rest:]
    header = fields_of(raw)
    check_name(listed.name, header)
    verify_payload(header, payload)
    if key is not None:
        verify_tag(raw, payload, key)


def _absent(store: Store, listed: ListedBlock, timeout: float) -> VerifiedBlock:
    """A block that was not read: it was removed, or its length is wrong."""
    seen = store.survey(NameQuery([listed.name]), timeout)
    if listed.size and seen.sizes[0] is None:
        wrong = Miss.FAILED_VERIFICATION in seen.misses  # the store checks blocks of its disk
        error = Corrupt("block", "the store found it wrong") if wrong else None
        return VerifiedBlock(listed, error, removed=True)
    return VerifiedBlock(
        listed, Corrupt("length", f"{listed.tokens} tokens do not make {listed.size}")
    )
