"""The interface of every store, and the values that pass through it.

Synchronous and thread-safe: it is called from I/O threads, and each call has a ``timeout`` in
seconds after which it raises ``DeadlineExceeded``. A store that cannot be reached raises
``Unavailable``; to a serving engine either is a miss. A store does not verify the blocks that it
hands out: the reader compares header and payload with what it wanted (``kvrelay.block.verify``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kvrelay.block.header import LONGEST, SHORTEST, Header, checksums, seal, stated_heads
from kvrelay.usage import Miss
from kvstore.device import DeviceSource, DeviceTarget
from kvstore.stats import StoreStats

if TYPE_CHECKING:
    from kvrelay.block.mac import BlockKey


@dataclass(frozen=True, slots=True)
class Tail:
    """A block to look for if exactly the first ``after`` names lead."""

    after: int
    name: bytes


@dataclass(frozen=True, slots=True)
class NameQuery:
    """Blocks to look for. Those found are held for ``ttl`` seconds (0: not held).

    ``first_block_hashes``, full and partial, serve the reason of a miss alone.
    """

    names: Sequence[bytes]
    tails: Sequence[Tail] = ()
    ttl: float = 0.0
    first_block_hashes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """The store keeps the blocks until ``deadline`` (``time.monotonic`` of this process).

    ``parts`` are the leases of a store made of several, each with the URL of the store that gave
    it. ``boot`` is the start of the store that gave the lease.
    """

    id: int
    boot: bytes
    deadline: float
    parts: tuple[tuple[str, Lease], ...] = ()


@dataclass(frozen=True, slots=True)
class LookupResult:
    """``lead`` names are present without a gap, then ``tails[tail]``; all held by ``lease``.

    ``sizes`` are the bytes (header and payload) of these blocks, in order. ``sources`` names, of
    several stores, the one that has each block; empty when there is only one store. ``missing``
    says why the next block is absent, ``None`` if none is. ``boot`` tells starts of the store
    apart, for stores that have them.
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
    """The bytes of each block in order, ``None`` if it is absent; all held by ``lease``.

    ``misses`` says why each absent block is absent, if the store can tell. ``first_block`` says
    under what other namespace a block with one of the first-block hashes is stored, if one is.
    """

    sizes: tuple[int | None, ...]
    lease: Lease | None
    misses: tuple[Miss | None, ...] = field(default=(), compare=False)
    first_block: Miss | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Want:
    """A block to get. ``buffer`` is writable, contiguous and as long as the payload must be.

    ``source`` is, of several stores, the one in which a lookup found the block; ``None``: any.
    ``key``: its reader accepts only what a holder of this key signed. A refused block with another
    tag may be removed. ``heads``: compute the checksums of so many heads on the way (0: none); with
    a key they are not needed, because the tags prove the payload. ``device``: a transport may copy
    the payload there instead of into the buffer.
    """

    name: bytes
    buffer: memoryview
    source: str | None = None
    partial: bool = False
    key: BlockKey | None = None
    heads: int = 0
    device: DeviceTarget | None = None

    def header_length(self, length: int) -> int | None:
        """Bytes of the header of a block of ``length``; ``None`` if the buffer does not fit it."""
        split = length - len(self.buffer)
        return split if SHORTEST <= split <= LONGEST else None


@dataclass(frozen=True, slots=True)
class GetResult:
    """The block of ``wants[index]``: its header's bytes; the payload is in the want's buffer.

    ``header`` is ``None`` if the block is absent. It is empty if something is stored under the name
    that cannot be the block: its length does not fit the buffer, or it is of another type.
    ``summed`` are the checksums of the payload's heads if they were computed here while the bytes
    arrived. ``source``: which of several stores sent the block. ``taken``: the payload went to the
    want's device, not into its buffer.
    """

    index: int
    header: bytes | None
    summed: tuple[int, ...] | None = None
    source: str | None = None
    taken: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """The bytes of one block. ``sealed=False``: its header lacks checksums and tags.

    The checksums are then computed while the block is copied, which is cheaper than another pass
    over the payload. ``key`` makes the tags. ``placed``: a device has already copied the payload to
    its target.
    """

    header: bytes
    payload: memoryview
    sealed: bool = True
    key: BlockKey | None = None
    placed: bool = False

    @property
    def size(self) -> int:
        """Bytes of header and payload."""
        return len(self.header) + self.payload.nbytes

    @property
    def heads(self) -> int:
        """Heads in the payload."""
        return stated_heads(self.header)

    def seal(self) -> Block:
        """The block with a complete header."""
        if self.sealed:
            return self
        return Block(self.complete(self.payload, checksums(self.payload, self.heads)), self.payload)

    def complete(self, payload: memoryview, summed: Sequence[int]) -> bytes:
        """The header for ``payload``, a copy of this block's, whose heads have these checksums."""
        return self.header if self.sealed else seal(self.header, payload, summed, self.key)


@dataclass(frozen=True, slots=True)
class Offer:
    """A block to put. ``read`` is called only if the store wants it; it gives ``size`` bytes.

    ``first_block_hash`` is ``kvrelay.block.Namer.first_block_hash`` of a sequence's first block.
    ``parent`` is the name of the block before it. A store keeps the parent while this block is
    written, and may refuse this block if the parent is absent. ``detached``: another store may have
    the parent. ``device``: the block is on an accelerator, which copies several before ``read``.
    """

    name: bytes
    size: int
    partial: bool
    read: Callable[[], Block]
    first_block_hash: int | None = None
    parent: bytes | None = None
    detached: bool = False
    device: DeviceSource | None = None


class PutStatus(Enum):
    """How the put of a block ended, or that it is still to be sent."""

    # Looked up for every block; the hash of ``Enum`` takes ten times as long.
    __hash__ = object.__hash__

    RESERVED = "reserved"  # there is room: the writer may send it
    STORED = "stored"
    EXISTED = "existed"
    PENDING = "pending"  # another writer was still sending it
    NO_ROOM = "no room"
    NO_PARENT = "no parent"  # refused: the parent is absent, so no lookup would find the block
    CORRUPT = "corrupt"
    EXPIRED = "expired"  # the reservation ended before the block was whole


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one offer ended; ``reason`` names the field of a corrupt block."""

    status: PutStatus
    reason: str | None = None

    @property
    def present(self) -> bool:
        """Whether the block is in the store."""
        return self.status in (PutStatus.STORED, PutStatus.EXISTED)


class Store(Protocol):
    """Blocks by name."""

    @property
    def url(self) -> str:
        """The store's URL, as ``connect`` takes it."""

    def lookup(self, query: NameQuery, timeout: float) -> LookupResult:
        """Find the longest leading run of the names, and a tail after it."""

    def survey(self, query: NameQuery, timeout: float) -> SurveyResult:
        """Find each of the names by itself; the query has no tails."""

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        """Yield each want once, in order, as it arrives. Close the generator to stop early.

        A store may verify the block at which the generator is closed, and remove it if it is wrong.
        """

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        """Put the absent blocks, each whole or not at all; an outcome for each offer, in order.

        Names are distinct. A block that another writer is putting is waited for.
        """

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        """Give leases back; leases that have ended are ignored."""

    def stats(self, timeout: float) -> StoreStats:
        """Read the store's content and counters."""

    def clear(self, timeout: float) -> int:
        """Remove every block that no lease holds; returns how many."""

    def close(self) -> None:
        """Close the connections; the blocks stay."""


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
