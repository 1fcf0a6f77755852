"""The one interface of every store, and the values that go through it.

Synchronous and thread-safe: it is called from I/O threads, and each call has a ``timeout`` in
seconds after which it raises ``DeadlineExceeded``. A store that cannot be reached raises
``Unavailable``; to a serving engine either is a miss. What a store hands out is not verified: the
reader compares header and payload with what it wanted (``kvrelay.block.verify``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kvrelay.block.header import MAX_COUNT, Header, checksum, header_bytes, seal
from kvrelay.usage import Miss
from kvstore.claims import Claim, ClaimStatus, Tail
from kvstore.stats import StoreStats


@dataclass(frozen=True, slots=True)
class Lease:
    """The store keeps the blocks until ``deadline`` (``time.monotonic`` of this process).

    ``parts`` are those of several stores in one, each with the name of the store that gave it.
    """

    id: int
    boot: bytes
    deadline: float
    parts: tuple[tuple[str, Lease], ...] = ()


@dataclass(frozen=True, slots=True)
class LookupResult:
    """A lookup's answer: ``lead`` names are there, then ``tails[tail]``; held by ``lease``.

    ``sizes`` are the bytes (header and payload) of these blocks, in order. ``sources`` name the
    one of several stores that has each; empty when there is only one. ``missing`` says why the
    first block after these is not there, ``None`` if all are. ``boot`` tells starts of the store
    apart, for those that have any.
    """

    lead: int
    tail: int | None
    sizes: tuple[int, ...]
    lease: Lease | None
    sources: tuple[str, ...] = ()
    missing: Miss | None = Miss.UNKNOWN
    boot: bytes | None = None


@dataclass(frozen=True, slots=True)
class SurveyResult:
    """A survey's answer: bytes of each block in order, ``None`` if absent; held by ``lease``.

    ``misses`` says why each of those is absent, if the store can tell; ``opening`` whether one of
    the openings asked about is there.
    """

    sizes: tuple[int | None, ...]
    lease: Lease | None
    misses: tuple[Miss | None, ...] = field(default=(), compare=False)
    opening: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Want:
    """A block to get. ``buffer`` is writable, contiguous and as long as the payload must be.

    ``source`` is the one of several stores that a lookup found it in; ``None``: any of them.
    """

    name: bytes
    buffer: memoryview
    source: str | None = None
    partial: bool = False

    def header_length(self, length: int) -> int | None:
        """Bytes of the header of a block of ``length``; ``None`` if the buffer does not fit it."""
        split = length - len(self.buffer)
        return split if header_bytes(0) <= split <= header_bytes(MAX_COUNT) else None


@dataclass(frozen=True, slots=True)
class GetResult:
    """``wants[index]`` has come: its header's bytes, the payload lies in the buffer.

    ``header`` is ``None`` when the block is absent or not as long as its buffer says. ``summed`` is
    the checksum of the buffer, if it was computed here as the bytes came. ``source`` is the one of
    several stores that it came from.
    """

    index: int
    header: bytes | None
    summed: int | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """The bytes of one block. ``sealed=False``: its header still lacks the payload's checksum.

    Then it is computed on the way, which costs less than a pass over the payload of its own.
    """

    header: bytes
    payload: memoryview
    sealed: bool = True

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.header) + self.payload.nbytes

    def seal(self) -> Block:
        """The block with a whole header."""
        if self.sealed:
            return self
        return Block(seal(self.header, checksum(self.payload)), self.payload)


@dataclass(frozen=True, slots=True)
class Offer:
    """A block to put. ``read`` is called only if the store wants it; it gives ``size`` bytes.

    ``opening`` is ``kvblock.Namer.opening`` of a sequence's first block.
    """

    name: bytes
    size: int
    partial: bool
    read: Callable[[], Block]
    opening: int | None = None


def claim_of(offer: Offer) -> Claim:
    """What an offer claims."""
    return Claim(offer.name, offer.size, offer.partial, offer.opening)


class PutStatus(Enum):
    """How a put ended."""

    __hash__ = object.__hash__  # as of ``ClaimStatus``

    STORED = "stored"
    EXISTED = "existed"
    PENDING = "pending"  # another writer was still at it when the time was over
    NO_ROOM = "no room"
    CORRUPT = "corrupt"
    EXPIRED = "expired"


NOT_SENT = {
    ClaimStatus.EXISTS: PutStatus.EXISTED,
    ClaimStatus.PENDING: PutStatus.PENDING,
    ClaimStatus.NO_ROOM: PutStatus.NO_ROOM,
}
"""How a put ends for a claim that got no reservation."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one offer; ``reason`` names the field of a corrupt block."""

    kept: PutStatus
    reason: str | None = None

    @property
    def present(self) -> bool:
        """Whether the block is in the store."""
        return self.kept in (PutStatus.STORED, PutStatus.EXISTED)


class Store(Protocol):
    """Blocks by name."""

    @property
    def url(self) -> str:
        """Where it is, as ``connect`` takes it."""

    def lookup(
        self,
        names: Sequence[bytes],
        tails: Sequence[Tail],
        ttl: float,
        timeout: float,
        openings: Sequence[int] = (),
    ) -> LookupResult:
        """How many of ``names`` lead without a gap, held for ``ttl`` seconds (0: not held).

        ``openings`` of the first block, full and partial, serve ``LookupResult.missing`` alone.
        """

    def survey(
        self, names: Sequence[bytes], ttl: float, timeout: float, openings: Sequence[int] = ()
    ) -> SurveyResult:
        """Which of ``names`` are there, each for itself, held for ``ttl`` seconds (0: not held)."""

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        """Each want once, in order, as it arrives. Close the generator to stop early.

        The store may look again at the block where it is closed, and remove it if it is wrong.
        """

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        """Put what is absent, each whole or not at all; an outcome for each offer, in order.

        Names are distinct. A block another writer is putting is waited for.
        """

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        """Give leases back; those that have ended are let pass."""

    def stats(self, timeout: float) -> StoreStats:
        """What the store holds and did."""

    def clear(self, timeout: float) -> int:
        """Remove every block no lease holds; how many."""

    def close(self) -> None:
        """Give up connections; the blocks stay."""


@dataclass(frozen=True, slots=True)
class ListedBlock:
    """A block as operators see it: ``size`` bytes of header and payload, ``tokens`` positions."""

    name: bytes
    size: int
    tokens: int
    partial: bool
    leases: int
    tenant: str
    memory: bool
    disk: bool


class StoreBrowser(Protocol):
    """A look into one store, for operators. Timeouts are in seconds."""

    def list(self, timeout: float, prefix: bytes = b"", limit: int = 0) -> Iterator[ListedBlock]:
        """Every block whose name begins with ``prefix``; ``limit`` 0 is none."""

    def inspect(self, name: bytes, timeout: float, tenant: str = "") -> tuple[ListedBlock, Header]:
        """One block and its header; ``NotFound`` if it is absent."""

    def close(self) -> None:
        """Close every connection."""
