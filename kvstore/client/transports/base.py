"""The interface of a transport, which carries the bytes of blocks, and what transports share."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from kvrelay.errors import Corrupt
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import Block, GetResult, Offer, Outcome, Want
from kvstore.client.transports.connection import StoreConnection
from kvstore.client.transports.grants import PutGrant
from kvstore.limits import MAX_LEASE_MS
from kvstore.wire.messages import outcomes_of
from kvstore.wire.pool import ConnectionPool

M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class GetProgress:
    """How many wants of a get are done, so that the next transport continues after a failure."""

    done: int = 0


class Transport(Protocol):
    """Fails with ``Unavailable`` or ``Corrupt``; the next transport then does the rest."""

    @property
    def name(self) -> str:
        """As in a URL's ``transport=``."""

    @property
    def title(self) -> str:
        """As in log lines."""

    def get(
        self, wants: Sequence[Want], progress: GetProgress, deadline: Deadline
    ) -> Generator[GetResult, None, None]:
        """As ``Store.get``, from ``progress.done`` on."""

    def put(self, offers: Sequence[Offer], deadline: Deadline) -> list[Outcome]:
        """As ``Store.put``, without waiting for other writers."""

    def send(self, granted: PutGrant, deadline: Deadline) -> list[Outcome]:
        """As ``put``, for blocks that have been reserved already."""

    def close(self, cut: bool = True) -> None:
        """Close every connection. Calls under way fail, or end normally with ``cut=False``."""


@contextmanager
def borrowed(
    pool: ConnectionPool[StoreConnection], deadline: Deadline
) -> Iterator[StoreConnection]:
    """A connection for one call; it goes back to the pool only if nothing failed."""
    connection = pool.acquire(deadline)
    try:
        connection.sock.limit(deadline.remaining())
        yield connection
    except BaseException:
        pool.discard(connection)
        raise
    if connection.usable:
        pool.release(connection)
    else:
        pool.discard(connection)


def lease_ms(deadline: Deadline) -> int:
    """How long blocks are leased for a call that ends by ``deadline``."""
    return min(max(round(deadline.remaining() * 1000), 1), MAX_LEASE_MS)


def read_offer(offer: Offer) -> Block:
    """Read a block that the store wants; ``ValueError`` if its size is not the offered one."""
    block = offer.read()
    if block.size != offer.size:
        raise ValueError(f"a block of {block.size} bytes was offered as one of {offer.size}")
    return block


def read_blocks(
    offers: Sequence[Offer], targets: Sequence[memoryview] = ()
) -> Generator[Block, None, None]:
    """Read the offered blocks in order; each is valid until the next one is taken.

    Blocks on a device are copied in batches as large as its pinned memory, into their ``targets``
    if the device can write there. Close the generator before the offers are used again.
    """
    ready = 0
    try:
        for number, offer in enumerate(offers):
            if number == ready:
                ready += _copied(offers[ready:], targets[ready:])
            yield read_offer(offer)
    finally:
        if offers and offers[0].device is not None:
            offers[0].device.recycle()


def _copied(offers: Sequence[Offer], targets: Sequence[memoryview]) -> int:
    """Copy a batch of the first offers out of their device; returns its size, at least one."""
    device = offers[0].device
    if device is None:
        return len(offers)
    device.recycle()
    count = 0
    try:
        for offer, target in zip_longest(offers, targets[: len(offers)]):
            if offer.device is None or not offer.device.start(target):
                break
            count += 1
    finally:
        device.settle()
    return max(count, 1)


def parse_answer(kind: type[M], body: bytes | None) -> M:
    """A message of this kind, empty for ``None``; ``Corrupt`` if ``body`` cannot be parsed."""
    try:
        return kind.FromString(body or b"")
    except DecodeError as error:
        raise Corrupt("answer", f"is no {kind.__name__}: {error}") from error


def parse_outcomes(body: bytes | None, count: int) -> list[Outcome]:
    """The outcomes in a ``PutResponse`` for ``count`` blocks."""
    return outcomes_of(parse_answer(pb.PutResponse, body), count)
