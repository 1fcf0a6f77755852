"""The way over a plain socket, for clients on other hosts: gRPC finds, the lane carries.

Blocks are received straight into the caller's buffers, one request ahead, and sent from them.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

from kvrelay.errors import Corrupt, KvrelayError, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import GetResult, Offer, Outcome, Want
from kvstore.client.transports.base import GetProgress, borrowed, lease_ms, parse_outcomes
from kvstore.client.transports.connection import dial_tcp
from kvstore.client.transports.fetching import batches_of, receive_batch, request_batch
from kvstore.client.transports.grants import PutGrant, abandoned_on_error, reserve_request
from kvstore.client.transports.staging import send
from kvstore.wire.pool import ConnectionPool

RELEASE_SECONDS = 1.0
AHEAD = 2
"""Requests on their way while the blocks of another are received."""


class Finder(Protocol):
    """The gRPC side."""

    def locate(
        self, names: Sequence[bytes], lease_ms: int, deadline: Deadline
    ) -> pb.LocateResponse:
        """``Locate``, held for ``lease_ms``."""

    def claim(self, request: pb.ReserveRequest, deadline: Deadline) -> pb.ReserveResponse:
        """``Reserve``."""

    def forgo(self, ticket: int, timeout: float) -> None:
        """Give up a reservation."""

    def let_go(self, boot: bytes, lease: int, timeout: float) -> None:
        """``Release``."""


class SocketTransport:
    """A ``Way``. ``Unavailable`` when made for a store that cannot be reached so."""

    name = "lane"
    title = "socket lane"

    def __init__(
        self, ways: pb.GetTransportsResponse, host: str, finder: Finder, deadline: Deadline
    ) -> None:
        if not ways.socket_port:
            raise Unavailable("the store has no lane")
        self._boot = ways.boot
        self._finder = finder
        self._lines = ConnectionPool(
            lambda deadline: dial_tcp(host, ways.socket_port, deadline, ways.boot)
        )
        with borrowed(self._lines, deadline):
            """Its first connection is made here, so that a lane that cannot be reached is known."""

    def get(
        self, wants: Sequence[Want], progress: GetProgress, deadline: Deadline
    ) -> Generator[GetResult, None, None]:
        """As the protocol says."""
        left = wants[progress.done :]
        asked = time.monotonic()
        found = self._finder.locate([want.name for want in left], lease_ms(deadline), deadline)
        if found.boot != self._boot:
            raise Unavailable("the store was started anew")
        if len(found.lengths) != len(left):
            raise Corrupt("lengths", f"{len(found.lengths)} came for {len(left)} names")
        base, until = progress.done, asked + found.lease_ms / 1000
        whole = False
        try:
            for index, header, summed in self._fetch(left, found, deadline):
                if time.monotonic() >= until:
                    header = None  # what was sent may have been another block by then
                progress.done = base + index + 1
                yield GetResult(base + index, header, summed)
            whole = True
        finally:
            if found.lease and not whole:
                self._let_go(found)

    def put(self, offers: Sequence[Offer], deadline: Deadline) -> list[Outcome]:
        """As the protocol says."""
        granted = PutGrant(self._finder.claim(reserve_request(offers), deadline), offers)
        with abandoned_on_error(self._finder, granted, deadline):
            return self.send(granted, deadline)

    def send(self, granted: PutGrant, deadline: Deadline) -> list[Outcome]:
        """As the protocol says."""
        if granted.ticket.boot != self._boot:
            raise Unavailable("the store was started anew")
        sent: list[Outcome] = []
        if granted.wanted:
            with borrowed(self._lines, deadline) as line:
                send(line, granted.ticket, granted.wanted, last=True)
                sent = parse_outcomes(line.body(), len(granted.wanted))
        return granted.outcomes(iter(sent))

    def close(self, cut: bool = True) -> None:
        """As the protocol says."""
        self._lines.close(cut)

    def _fetch(
        self, wants: Sequence[Want], found: pb.LocateResponse, deadline: Deadline
    ) -> Iterator[tuple[int, bytes | None, int | None]]:
        """Number, header and checksum of each want, in order; payloads go into their buffers."""
        batches = batches_of(wants, found.lengths)
        done = 0
        if batches:
            with borrowed(self._lines, deadline) as line:
                for number in range(min(AHEAD, len(batches))):
                    request_batch(line, found, batches, number)
                for number, batch in enumerate(batches):
                    if number + AHEAD < len(batches):
                        request_batch(line, found, batches, number + AHEAD)
                    for one in receive_batch(line, wants, found.lengths, batch):
                        while done < one[0]:
                            yield done, None, None
                            done += 1
                        yield one
                        done += 1
                line.body()
        yield from ((absent, None, None) for absent in range(done, len(wants)))

    def _let_go(self, found: pb.LocateResponse) -> None:
        try:
            self._finder.let_go(found.boot, found.lease, RELEASE_SECONDS)
        except KvrelayError:
            return  # it ends by its deadline
