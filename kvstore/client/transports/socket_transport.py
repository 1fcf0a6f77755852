"""The transport over a TCP socket, for clients on other hosts: gRPC locates, the socket carries.

Blocks are received straight into the caller's buffers, with the next requests already sent, and
are sent from the caller's buffers.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from kvrelay.errors import Corrupt, KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import GetResult, Offer, Outcome, Want
from kvstore.client.calls import StoreCalls
from kvstore.client.transports.base import GetProgress, borrowed, lease_ms, parse_outcomes
from kvstore.client.transports.connection import StoreConnection, dial_tcp
from kvstore.client.transports.grants import PutGrant, abandoned_on_error, reserve_request
from kvstore.client.transports.staging import send_blocks
from kvstore.wire.buffers import skip
from kvstore.wire.copying import HASH_CHUNK, receive_block
from kvstore.wire.frames import Op, RequestFrame, Status
from kvstore.wire.pool import ConnectionPool

RELEASE_SECONDS = 1.0

AHEAD = 2
"""Requests that have been sent while the blocks of another one are received."""

BATCH_BYTES = 4 << 20
"""Asked for in one request."""

LARGE = 128 << 10
"""From this size on a block is received by itself, and summed while it lies in the CPU's cache."""

Received = tuple[int, bytes | None, tuple[int, ...] | None]
"""Index of a want, its header (``None``: absent), the heads' checksums if they were computed."""


class SocketTransport:
    """A ``Transport``. The constructor raises ``Unavailable`` if the store cannot be reached so."""

    name = "socket"
    title = "TCP socket"

    def __init__(
        self,
        offered: pb.GetTransportsResponse,
        host: str,
        calls: StoreCalls,
        deadline: Deadline,
    ) -> None:
        if not offered.socket_port:
            raise Unavailable("the store offers no socket")
        self._boot = offered.boot
        self._calls = calls
        self._pool = ConnectionPool(
            lambda deadline: dial_tcp(host, offered.socket_port, deadline, offered.boot)
        )
        with borrowed(self._pool, deadline):
            """The first connection is made here: a socket that cannot be reached raises."""

    def get(
        self, wants: Sequence[Want], progress: GetProgress, deadline: Deadline
    ) -> Generator[GetResult, None, None]:
        base = progress.done
        left = wants[base:]
        asked = time.monotonic()
        located = self._calls.locate([want.name for want in left], lease_ms(deadline), deadline)
        if located.boot != self._boot:
            raise Unavailable("the store was restarted")
        if len(located.lengths) != len(left):
            raise Corrupt("lengths", f"{len(located.lengths)} were answered for {len(left)} names")
        until = asked + located.lease_ms / 1000
        complete = False
        try:
            for index, header, summed in self._fetch(left, located, deadline):
                if time.monotonic() >= until:
                    header = None  # its place may have held another block when it was sent
                progress.done = base + index + 1
                yield GetResult(base + index, header, summed)
            complete = True
        finally:
            if located.lease and not complete:
                self._release(located)

    def put(self, offers: Sequence[Offer], deadline: Deadline) -> list[Outcome]:
        granted = PutGrant(self._calls.reserve(reserve_request(offers), deadline), offers)
        with abandoned_on_error(self._calls, granted, deadline):
            return self.send(granted, deadline)

    def send(self, granted: PutGrant, deadline: Deadline) -> list[Outcome]:
        if granted.ticket.boot != self._boot:
            raise Unavailable("the store was restarted")
        sent: list[Outcome] = []
        if granted.wanted:
            with borrowed(self._pool, deadline) as connection:
                send_blocks(connection, granted.ticket, granted.wanted, last=True)
                sent = parse_outcomes(connection.receive_body(), len(granted.wanted))
        return granted.outcomes(iter(sent))

    def close(self, cut: bool = True) -> None:
        self._pool.close(cut)

    def _fetch(
        self, wants: Sequence[Want], located: pb.LocateResponse, deadline: Deadline
    ) -> Iterator[Received]:
        """Each want, in order; payloads go into their buffers."""
        batches = batches_of(wants, located.lengths)
        done = 0
        if batches:
            with borrowed(self._pool, deadline) as connection:
                for number in range(min(AHEAD, len(batches))):
                    _request(connection, located, batches, number)
                for number, batch in enumerate(batches):
                    if number + AHEAD < len(batches):
                        _request(connection, located, batches, number + AHEAD)
                    for received in _receive(connection, wants, located.lengths, batch):
                        while done < received[0]:
                            yield done, None, None
                            done += 1
                        yield received
                        done += 1
                connection.receive_body()
        yield from ((absent, None, None) for absent in range(done, len(wants)))

    def _release(self, located: pb.LocateResponse) -> None:
        try:
            self._calls.release_lease(located.boot, located.lease, RELEASE_SECONDS)
        except KvrelayError:
            return  # the lease ends by its deadline


@dataclass(slots=True)
class FetchBatch:
    """Blocks that follow one another in the lease, from number ``first`` on."""

    first: int
    wants: list[int]
    size: int


def batches_of(wants: Sequence[Want], lengths: Sequence[int]) -> list[FetchBatch]:
    """The blocks that were found, in batches. The lease holds a name asked for twice once."""
    batches: list[FetchBatch] = []
    numbers: dict[bytes, int] = {}
    for index, (want, length) in enumerate(zip(wants, lengths, strict=True)):
        if not length:
            continue
        number = numbers.setdefault(want.name, len(numbers))
        last = batches[-1] if batches else None
        if (
            last is None
            or number != last.first + len(last.wants)
            or last.size + length > BATCH_BYTES
        ):
            last = FetchBatch(number, [], 0)
            batches.append(last)
        last.wants.append(index)
        last.size += length
    return batches


def _request(
    connection: StoreConnection,
    located: pb.LocateResponse,
    batches: Sequence[FetchBatch],
    number: int,
) -> None:
    batch = batches[number]
    last = number == len(batches) - 1
    connection.send(
        RequestFrame(Op.GET, located.lease, located.proof, batch.first, len(batch.wants), last=last)
    )


def _receive(
    connection: StoreConnection, wants: Sequence[Want], lengths: Sequence[int], batch: FetchBatch
) -> Iterator[Received]:
    """Each block of a batch, in order; all are absent if the lease has ended."""
    answer = connection.receive_frame()
    if answer.status is Status.ENDED:
        yield from ((index, None, None) for index in batch.wants)
        return
    if answer.length != batch.size:
        raise Corrupt("answer", f"{answer.length} bytes were sent and {batch.size} were located")
    largest = max(lengths[index] for index in batch.wants)
    if largest < LARGE:
        step = HASH_CHUNK // largest
        for start in range(0, len(batch.wants), step):
            yield from _small(connection, wants, lengths, batch.wants[start : start + step])
        return
    for index in batch.wants:
        header, summed = _large(connection, wants[index], lengths[index])
        yield index, header, summed


def _small(
    connection: StoreConnection,
    wants: Sequence[Want],
    lengths: Sequence[int],
    indices: Sequence[int],
) -> Iterator[Received]:
    """Blocks received by one system call; few enough to be in the CPU's cache when verified."""
    headers: list[bytearray] = []
    views: list[memoryview] = []
    for index in indices:
        header = bytearray(wants[index].header_length(lengths[index]) or 0)
        headers.append(header)
        views += (memoryview(header), wants[index].buffer) if header else skip(lengths[index])
    connection.sock.receive_into(views)
    for index, header in zip(indices, headers, strict=True):
        yield index, bytes(header), None


def _large(
    connection: StoreConnection, want: Want, length: int
) -> tuple[bytes, tuple[int, ...] | None]:
    """One block, summed chunk by chunk while the next chunk is on its way."""
    if (split := want.header_length(length)) is None:
        for scratch in skip(length):
            connection.sock.receive_into([scratch])
        return b"", None
    header = bytearray(split)
    receive = connection.sock.receive_into
    summed = receive_block(receive, memoryview(header), want.buffer, want.heads)
    return bytes(header), summed
