"""What every way to the bytes can do, and what all of them need."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from kvrelay.errors import Corrupt
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import Block, GetResult, Offer, Outcome, Want
from kvstore.client.transports.connection import StoreConnection
from kvstore.client.transports.grants import PutGrant
from kvstore.wire.messages import MAX_LEASE_MS, outcomes_of
from kvstore.wire.pool import ConnectionPool

M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class GetProgress:
    """How many wants of a get have been answered, for who goes on when a way breaks."""

    done: int = 0


class Transport(Protocol):
    """A way breaks with ``Unavailable`` or ``Corrupt``; the next one then does the rest."""

    @property
    def name(self) -> str:
        """As in a URL's ``way=``."""

    @property
    def title(self) -> str:
        """For people."""

    def get(
        self, wants: Sequence[Want], progress: GetProgress, deadline: Deadline
    ) -> Generator[GetResult, None, None]:
        """As ``Store.get``, from ``progress.done`` on."""

    def put(self, offers: Sequence[Offer], deadline: Deadline) -> list[Outcome]:
        """As ``Store.put``, without waiting for other writers."""

    def send(self, granted: PutGrant, deadline: Deadline) -> list[Outcome]:
        """The same for blocks that are reserved already."""

    def close(self, cut: bool = True) -> None:
        """Give up connections; calls under way break, or with ``cut=False`` end first."""


@contextmanager
def borrowed(
    lines: ConnectionPool[StoreConnection], deadline: Deadline
) -> Iterator[StoreConnection]:
    """A connection for one call; it is kept only if all went well."""
    line = lines.acquire(deadline)
    try:
        line.sock.limit(deadline.remaining())
        yield line
    except BaseException:
        lines.discard(line)
        raise
    if line.sound:
        lines.release(line)
    else:
        lines.discard(line)


def lease_ms(deadline: Deadline) -> int:
    """How long blocks are to be held for a call that ends by ``deadline``."""
    return min(max(round(deadline.remaining() * 1000), 1), MAX_LEASE_MS)


def read_offer(offer: Offer) -> Block:
    """Read a block that is wanted; it must be as long as was said."""
    block = offer.read()
    if block.size != offer.size:
        raise ValueError(f"a block of {block.size} bytes was offered as one of {offer.size}")
    return block


def parse_answer(kind: type[M], body: bytes | None) -> M:
    """An answer, of which ``None`` says nothing; ``Corrupt`` when it is none."""
    try:
        return kind.FromString(body or b"")
    except DecodeError as error:
        raise Corrupt("answer", f"is no {kind.__name__}: {error}") from error


def parse_outcomes(body: bytes | None, count: int) -> list[Outcome]:
    """The outcomes in a ``PutResponse`` for ``count`` blocks."""
    return outcomes_of(parse_answer(pb.PutResponse, body), count)
