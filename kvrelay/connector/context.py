"""What all jobs of one store connector share: the store, the worker's pool, limits and counters."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from kvrelay.connector.counters import Meter
from kvstore import Store

if TYPE_CHECKING:
    from kvrelay.block.mac import BlockKey

MIB = 1 << 20


class PayloadShape(Protocol):
    """The part of a pool's shape that decides the bytes of a block."""

    @property
    def num_layers(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...


class BlockMemory(Protocol):
    """The worker's pool, as loads and saves use it."""

    @property
    def shape(self) -> PayloadShape: ...

    def nbytes(self, count: int) -> int:
        """Bytes of the payload of ``count`` positions."""

    def read(self, block: int, count: int) -> memoryview:
        """The payload of a block's first ``count`` positions."""

    def write(self, block: int, count: int, payload: memoryview) -> None:
        """Fill a block's first ``count`` positions."""

    def buffer(self, block: int) -> memoryview | None:
        """A whole block as writable bytes, if it is in host memory."""


class CopiedBlock(Protocol):
    """A block that is copied to the host; ``payload`` is valid once the batch is settled."""

    @property
    def payload(self) -> memoryview: ...
    @property
    def placed(self) -> bool:
        """Whether it is in the target that the caller gave."""

    @property
    def turn(self) -> int:
        """The batch's ``turn`` when the copy started; the payload is invalid in a later one."""


class CopyBatch(Protocol):
    """Copies of a device, or in host memory; leaving the ``with`` waits for them."""

    @property
    def background(self) -> bool:
        """Whether a copy runs while its block is verified; else only right blocks are copied."""

    @property
    def turn(self) -> int:
        """How often the batch was recycled."""

    def __enter__(self) -> CopyBatch: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def slot(self) -> memoryview | None:
        """Room for a block (pinned, for a device) in this batch; ``None`` if none is left."""

    def load(self, block: int, count: int, payload: memoryview) -> bool:
        """Start to fill a block; ``False`` if the device cannot read this memory."""

    def save(self, block: int, count: int, target: memoryview | None) -> CopiedBlock | None:
        """Start to copy a block to ``target`` or pinned memory; ``None`` if none is left."""

    def settle(self) -> None:
        """Wait until every copy that was started has ended."""

    def recycle(self) -> None:
        """Free the pinned memory of copies that have ended."""


class DeviceCopies(Protocol):
    """The batches of a pool in the memory of a device, or of vLLM's pages in host memory."""

    @property
    def most_blocks(self) -> int:
        """The most blocks of a batch of loads."""

    def loading(self) -> CopyBatch: ...
    def saving(self) -> CopyBatch: ...


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Seconds, bytes and threads. An answer counts for ``lease_seconds`` less the margin."""

    lookup_seconds: float = 1.0  # from when it is sent
    lookup_queue_seconds: float = 10.0  # a lookup that waits longer for a thread is not sent
    queue_seconds: float = 30.0  # a load that waits longer for a thread fails
    load_seconds: float = 5.0  # once it has a thread, and more for many bytes:
    save_seconds: float = 10.0
    slowest_bytes_per_second: float = 100.0 * MIB
    lease_seconds: float = 30.0
    lease_margin_seconds: float = 6.0
    retry_seconds: float = 1.0  # an answer without tokens is looked up again after this
    max_pending_save_bytes: int = 1024 * MIB
    batch_bytes: int = 64 * MIB  # scratch memory of one load or save
    lookup_threads: int = 4  # lookups in flight
    load_threads: int = 4
    save_threads: int = 2
    key: BlockKey | None = None  # signs blocks, and only signed ones are accepted

    def load_timeout(self, nbytes: int) -> float:
        """Seconds that a load of ``nbytes`` may take."""
        return self.load_seconds + nbytes / self.slowest_bytes_per_second

    def save_timeout(self, nbytes: int) -> float:
        """Seconds that a save of ``nbytes`` may take."""
        return self.save_seconds + nbytes / self.slowest_bytes_per_second


@dataclass(frozen=True, slots=True)
class JobContext:
    """Shared by all jobs; every part is thread-safe."""

    store: Store
    pool: BlockMemory
    options: ConnectorOptions
    meter: Meter
    copies: DeviceCopies | None = None  # of a pool that takes batches
