"""A load under way: blocks come from the store, are compared with what was wanted, and count.

Nothing counts before it is verified, and nothing after the first block that is missing or wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Protocol

from kvrelay.block.verify import verify_block
from kvrelay.connector.counters import Meter
from kvrelay.connector.geometry import Geometry, LoadTarget
from kvrelay.connector.lookups import LookupAnswer
from kvrelay.connector.options import ConnectorOptions
from kvrelay.engine.core.external import Load, Loaded, TransferEvent
from kvrelay.errors import Corrupt, DeadlineExceeded, KvrelayError
from kvrelay.usage import Miss
from kvstore import GetResult, Store, Want
from kvstore.limits import MAX_NAMES
from kvstore.urls import public_url


class Pool(Protocol):
    """What a load and a save need of the worker's pool."""

    def nbytes(self, count: int) -> int:
        """Bytes of the payload of ``count`` positions."""

    def read(self, block: int, count: int) -> memoryview:
        """The payload of a block's first ``count`` positions."""

    def write(self, block: int, count: int, payload: memoryview) -> None:
        """Fill a block's first ``count`` positions."""

    def buffer(self, block: int) -> memoryview | None:
        """A whole block as writable bytes, if it is in host memory."""


def load_targets(load: Load, answer: LookupAnswer | None, geometry: Geometry) -> list[LoadTarget]:
    """The blocks that make up the range of ``load``, as the lookup found them.

    Without the lookup's answer, a block whose end is in the range is taken to be full and the
    rest to be a partial block of exactly that length.
    """
    size, end = geometry.block_size, load.local + load.external
    known = answer if answer is not None and answer.length == len(load.tokens) else None
    lead = end // size if known is None else known.lead
    tail = end % size if known is None else known.tail
    parts = []
    for offset, block in enumerate(load.blocks):
        index = load.local // size + offset
        count = size if index < lead else tail if index == lead else 0
        if count == 0 or index * size >= end:
            break
        source = None if known is None else known.source(index)
        parts.append(geometry.part(load.tokens, load.names, index, count, block, source))
    return parts


class LoadJob:
    """A job of the lane of loads; its end is one ``Loaded``."""

    def __init__(
        self,
        load: Load,
        parts: Sequence[LoadTarget],
        store: Store,
        pool: Pool,
        block_size: int,
        options: ConnectorOptions,
        meter: Meter,
        end: Callable[[TransferEvent], None],
    ) -> None:
        self._load = load
        self._parts = parts
        self._store = store
        self._pool = pool
        self._options = options
        self._block_size = block_size
        self._meter = meter
        self._end = end
        self._give_up_at = time.monotonic() + options.queue_seconds
        self._deadline = self._give_up_at
        self._default = public_url(store.url)
        self._valid_to = load.local
        self._sources: dict[str, int] = {}  # tokens of valid blocks by the store they came from
        self._missed = Miss.UNKNOWN  # why, if it ends short

    def run(self) -> None:
        """Get, verify and count until the end or the first failure."""
        try:
            self._begin()
            for batch in self._batches():
                if not self._fill(batch):
                    break
        except Corrupt as error:
            self._meter.add(corrupt=1)
            other = error.field == "namespace"
            self._missed = Miss.OTHER_NAMESPACE if other else Miss.FAILED_VERIFICATION
        except DeadlineExceeded:
            self._meter.add(load_failures=1)
            self._missed = Miss.TOO_LATE
        except KvrelayError:
            self._meter.add(load_failures=1)
            self._missed = Miss.UNREACHABLE
        finally:
            self._finish()

    def give_up(self) -> None:
        """End with what is valid: nothing."""
        self._meter.add(load_failures=1)
        self._missed = Miss.UNREACHABLE
        self._finish()

    def _begin(self) -> None:
        now = time.monotonic()
        if now > self._give_up_at:
            raise DeadlineExceeded("the load had to wait too long for its turn")
        nbytes = sum(self._pool.nbytes(len(part.wanted.tokens)) for part in self._parts)
        self._deadline = now + self._options.load_timeout(nbytes)

    def _finish(self) -> None:
        load = self._load
        valid = min(self._valid_to - load.local, load.external)
        self._meter.add(open_loads=-1, loaded_tokens=valid, loads_short=valid < load.external)
        missed = self._missed if valid < load.external else None
        sources = tuple(self._sources.items())
        self._end(Loaded(load.request_id, load.epoch, valid, missed, sources))

    def _batches(self) -> Iterator[list[LoadTarget]]:
        """As many blocks at a time as scratch memory is allowed for."""
        batch: list[LoadTarget] = []
        nbytes = 0
        for part in self._parts:
            size = self._pool.nbytes(len(part.wanted.tokens))
            full = len(batch) == MAX_NAMES or nbytes + size > self._options.batch_bytes
            if batch and full:
                yield batch
                batch, nbytes = [], 0
            batch.append(part)
            nbytes += size
        if batch:
            yield batch

    def _fill(self, parts: list[LoadTarget]) -> bool:
        """One call to the store; whether every block came and was right."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded("the load's time was over between two batches")
        wants = [self._want(part) for part in parts]
        with closing(self._store.get(wants, remaining)) as arriving:
            return all(self._accept(parts[g.index], wants[g.index], g) for g in arriving)

    def _want(self, part: LoadTarget) -> Want:
        partial = len(part.wanted.tokens) < self._block_size
        return Want(part.wanted.name, self._buffer(part), part.source, partial)

    def _buffer(self, part: LoadTarget) -> memoryview:
        direct = self._direct(part)
        if direct is not None:
            return direct
        return memoryview(bytearray(self._pool.nbytes(len(part.wanted.tokens))))

    def _direct(self, part: LoadTarget) -> memoryview | None:
        whole = self._pool.buffer(part.block)
        count = len(part.wanted.tokens)
        return whole if whole is not None and whole.nbytes == self._pool.nbytes(count) else None

    def _accept(self, part: LoadTarget, want: Want, got: GetResult) -> bool:
        """Verify one block and count it; false when it did not come."""
        if got.header is None:
            self._meter.add(absent=1)
            self._missed = Miss.TOO_LATE  # it was there when it was looked up
            return False
        verify_block(got.header, part.wanted, want.buffer, got.summed)
        if self._direct(part) is None:
            self._pool.write(part.block, len(part.wanted.tokens), want.buffer)
        source, last = got.source or self._default, self._load.local + self._load.external
        tokens = min(part.end, last) - self._valid_to
        self._sources[source] = self._sources.get(source, 0) + tokens
        self._valid_to = part.end
        self._meter.add(loaded_bytes=want.buffer.nbytes)
        return True
