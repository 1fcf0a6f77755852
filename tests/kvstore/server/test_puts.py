"""Blocks that come together: borrowed and made visible as a group, each right or not for itself."""

from __future__ import annotations

import socket
import threading
from functools import partial
from unittest.mock import ANY

import pytest

from kvrelay.block.header import Header, checksum, encode
from kvrelay.block.name import child_name
from kvrelay.errors import DeadlineExceeded, Rejected, Unavailable
from kvstore import Block, Offer, PutStatus
from kvstore.claims import Claim, Grant
from kvstore.client.remote import RemoteStore
from kvstore.client.transports.selector import TRANSPORTS
from kvstore.client.transports.staging import MOST_BATCH, batches, first_batch
from kvstore.limits import ReservationShares, StoreLimits
from kvstore.server import puts
from kvstore.server.block_store import BlockStore
from kvstore.server.puts import ReceiveRow, place_rows
from kvstore.server.slot import WriteSlot
from kvstore.wire.frames import BlockRow
from kvstore.wire.sockets import DeadlineSocket
from tests.kvstore.rig import TIMEOUT, get, make, name_of, offer, present

BUDGET = 1 << 20


class Writer:
    """One ticket on a block_store of its own, for blocks of 1,000 bytes."""

    def __init__(self, count: int, shares: ReservationShares | None = None) -> None:
        self.block_store = BlockStore(
            StoreLimits(BUDGET) if shares is None else StoreLimits(BUDGET, shares=shares)
        )
        self.blocks = [make(1000) for _ in range(count)]
        self.names = [name_of(block) for block in self.blocks]
        self.rows = [BlockRow(name_of(block), block.size) for block in self.blocks]
        claims = [Claim(name_of(block), block.size, False) for block in self.blocks]
        self.grant: Grant = self.block_store.reserve(claims)

    def bring(self, slot: WriteSlot | None, row: BlockRow) -> None:
        """As it comes through the window."""
        if slot is not None:
            block = self.blocks[self.names.index(row.name)]
            slot.copy_from(memoryview(block.header + bytes(block.payload)))

    def put(
        self, bring: ReceiveRow | None = None, rows: list[BlockRow] | None = None
    ) -> list[PutStatus]:
        """What became of each row."""
        found = place_rows(
            self.block_store, self.grant.ticket or 0, b"", rows or self.rows, bring or self.bring
        )
        return [outcome.status for outcome in found]

    def there(self) -> list[bool]:
        """Which of the blocks are visible."""
        found = self.block_store.survey(self.names, 0.0)
        return [size is not None for size in found.sizes]

    def check(self) -> None:
        """Nothing is held, and every place is a visible block's or free."""
        self.block_store.abandon(self.grant.ticket or 0)
        self.block_store.clear()
        stats = self.block_store.stats()
        assert (stats.entries, stats.bytes, stats.reservations) == (0, 0, 0)
        slots = self.block_store.arena.slots
        assert (slots.used, slots.longest) == (0, slots.capacity)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_wrong_block_among_many_is_the_only_one_refused(service_url: str, transport: str) -> None:
    store = RemoteStore(service_url.removeprefix("kvrelay://"), transport)
    try:
        blocks = [make(60_000) for _ in range(9)]
        wrong = make(60_000, like=blocks[4])
        offers = [offer(block) for block in blocks]
        offers[4] = offer(Block(blocks[4].header, wrong.payload))
        outcomes = store.put(offers, TIMEOUT)
        kept = [outcome.status for outcome in outcomes]
        assert kept == [PutStatus.CORRUPT if i == 4 else PutStatus.STORED for i in range(9)]
        assert [outcome.reason is None for outcome in outcomes] == [i != 4 for i in range(9)]
        assert (outcomes[4].reason or "").startswith("payload_checksum:")
        assert present(store, *blocks) == [i != 4 for i in range(9)]
        assert all(got.header is not None for got in get(store, *blocks[:4], *blocks[5:]))
        stats = store.stats(TIMEOUT)
        assert (stats.reservations, stats.reserved_bytes) == (0, 0)
    finally:
        store.clear(TIMEOUT)
        store.close()


@pytest.mark.parametrize("there", [range(3), range(3, 12), range(0, 12, 2), range(12), range(0)])
def test_what_exists_is_not_sent_again_wherever_it_stands(service_url: str, there: range) -> None:
    """The first batch of a put, of three blocks here, is reserved and sent before the others."""
    store = RemoteStore(service_url.removeprefix("kvrelay://"), "shm")
    try:
        for _ in range(2):  # on one connection
            blocks = [make(120_000) for _ in range(12)]
            before = [offer(blocks[i]) for i in there]
            read: list[bytes] = []

            def reading(block: Block, read: list[bytes] = read) -> Block:
                read.append(name_of(block))
                return block

            assert all(outcome.present for outcome in store.put(before, TIMEOUT))
            offers = [
                Offer(name_of(block), block.size, False, partial(reading, block))
                for block in blocks
            ]
            kept = [outcome.status for outcome in store.put(offers, TIMEOUT)]
            assert kept == [
                PutStatus.EXISTED if i in there else PutStatus.STORED for i in range(12)
            ]
            assert read == [name_of(block) for i, block in enumerate(blocks) if i not in there]
            assert all(got.header is not None for got in get(store, *blocks))
            stats = store.stats(TIMEOUT)
            assert (stats.reservations, stats.reserved_bytes) == (0, 0)
        assert store.breaks == {}
    finally:
        store.clear(TIMEOUT)
        store.close()


def test_a_ticket_is_given_more_while_it_stands() -> None:
    writer = Writer(2)
    ticket = writer.grant.ticket
    more = Claim(b"m" * 32, 1000, False)
    assert writer.block_store.reserve([more], ticket) == Grant(ticket, ANY, (PutStatus.RESERVED,))
    assert writer.put() == [PutStatus.STORED] * 2
    assert writer.block_store.reserved_claim(ticket or 0, more.name) == more
    writer.block_store.abandon(ticket or 0)
    other = writer.block_store.reserve([more], ticket)
    assert other.ticket not in (None, ticket)
    writer.block_store.abandon(other.ticket or 0)
    writer.check()


def test_a_group_is_visible_when_all_of_it_has_come() -> None:
    writer, seen = Writer(4), []

    def bring(slot: WriteSlot | None, row: BlockRow) -> None:
        writer.bring(slot, row)
        seen.append(any(writer.there()))

    assert writer.put(bring) == [PutStatus.STORED] * 4
    assert (seen, writer.there()) == ([False] * 4, [True] * 4)
    writer.check()


def test_a_ticket_that_ends_in_the_middle_ends_what_comes_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(puts, "GROUP_BLOCKS", 2)
    writer = Writer(6)

    def bring(slot: WriteSlot | None, row: BlockRow) -> None:
        if row.name == writer.names[3]:
            writer.block_store.abandon(writer.grant.ticket or 0)
        assert (slot is None) == (row.name in writer.names[4:])
        writer.bring(slot, row)

    assert writer.put(bring) == [PutStatus.STORED] * 2 + [PutStatus.EXPIRED] * 4
    assert writer.there() == [True] * 2 + [False] * 4
    writer.check()


def test_a_block_that_stands_twice_in_one_batch_has_one_place() -> None:
    writer = Writer(3)
    rows = [writer.rows[0], writer.rows[1], writer.rows[0], writer.rows[2]]
    assert writer.put(rows=rows) == [
        PutStatus.STORED,
        PutStatus.STORED,
        PutStatus.EXPIRED,
        PutStatus.STORED,
    ]
    assert writer.there() == [True] * 3
    writer.check()


def test_what_was_not_reserved_is_let_pass() -> None:
    """The share of a ticket has room for two of them."""
    writer = Writer(4, ReservationShares(ticket=2.5 * make(1000).size / BUDGET, all=1.0))
    assert writer.grant.verdicts == (*[PutStatus.RESERVED] * 2, *[PutStatus.PENDING] * 2)
    assert writer.put() == [PutStatus.STORED] * 2 + [PutStatus.EXPIRED] * 2
    writer.check()


def test_without_a_ticket_nothing_is_lent() -> None:
    writer = Writer(2)
    outcomes = place_rows(
        writer.block_store, writer.grant.ticket or 0, None, writer.rows, writer.bring
    )
    assert [outcome.status for outcome in outcomes] == [PutStatus.EXPIRED] * 2
    assert writer.there() == [False] * 2
    writer.check()


@pytest.mark.parametrize("fault", ["cut", "size"])
def test_what_was_whole_before_a_fault_is_there_and_the_rest_is_given_back(fault: str) -> None:
    writer = Writer(5)

    def bring(slot: WriteSlot | None, row: BlockRow) -> None:
        if fault == "cut" and row.name == writer.names[2]:
            raise Unavailable("the connection was closed by the other side")
        writer.bring(slot, row)

    if fault == "size":
        writer.rows[2] = BlockRow(writer.names[2], writer.blocks[2].size - 1)
    with pytest.raises(Unavailable if fault == "cut" else Rejected):
        writer.put(bring)
    assert writer.there() == [True] * 2 + [False] * 3
    writer.check()


def test_what_changes_in_the_window_while_it_is_copied_is_refused() -> None:
    """The header's length is read before the header is: whatever it then says, bytes are bytes."""
    writer = Writer(2)
    slots = writer.block_store.slots(writer.grant.ticket or 0, writer.names)
    for slot, block in zip(slots, writer.blocks, strict=True):
        assert slot is not None
        raw = bytearray(block.header + bytes(block.payload))
        # A length that another write has left there.
        raw[12:16] = (len(raw) + 128 if slot is slots[0] else 100).to_bytes(4, "little")
        slot.copy_from(memoryview(raw))
    outcomes = writer.block_store.settle(slots)
    assert [outcome.status for outcome in outcomes] == [PutStatus.CORRUPT] * 2
    assert writer.block_store.stats().counters.corrupt == 2
    assert writer.there() == [False] * 2
    writer.check()


def test_a_connection_may_rest_and_a_request_may_not() -> None:
    resting, stalled = socket.socketpair(), socket.socketpair()
    found: list[bool] = []
    try:
        pipe = DeadlineSocket(resting[0])
        pipe.limit(0.001)
        thread = threading.Thread(target=lambda: found.append(pipe.wait_readable(idle=True)))
        thread.start()
        other = DeadlineSocket(stalled[0])
        other.limit(0.02)
        with pytest.raises(DeadlineExceeded):
            other.wait_readable()
        assert thread.is_alive()
        resting[1].send(b"x")
        thread.join(TIMEOUT)
        assert found == [True]
    finally:
        for sock in (*resting, *stalled):
            sock.close()


def test_batches_begin_small_and_keep_the_order() -> None:
    def offers(count: int, size: int) -> list[Offer]:
        block = make(0)
        return [Offer(bytes([n]) * 32, size, False, lambda: block) for n in range(count)]

    for count, size in ((1, 100), (32, 65_792), (32, 1 << 20), (9, 5 << 20), (5, 9 << 20)):
        some = offers(count, size)
        cut = list(batches(some, first_batch(some), 8 << 20))
        assert [one.name[0] for batch in cut for one in batch] == list(range(count))
        lengths = [sum(one.size for one in batch) for batch in cut]
        assert all(n <= MOST_BATCH or len(b) == 1 for n, b in zip(lengths, cut, strict=True))
        assert lengths[0] <= max(count * size // 16, 384 << 10, size)


def test_a_name_follows_from_a_header_as_from_its_tokens(service_url: str) -> None:
    """With as many tokens as there may be, and none above what 32 bits hold."""
    store = RemoteStore(service_url.removeprefix("kvrelay://"))
    try:
        tokens, space, parent = tuple(range((1 << 32) - 3000, 1 << 32)), b"s" * 32, b"p" * 32
        name, payload = child_name(space, parent, tokens), bytes(64)
        header = Header(space, parent, name, tokens, "uint8", (1, 64), 64, (checksum(payload),))
        block = Block(encode(header), memoryview(payload))
        assert [outcome.status for outcome in store.put([offer(block)], TIMEOUT)] == [
            PutStatus.STORED
        ]
    finally:
        store.clear(TIMEOUT)
        store.close()
