"""A load: blocks are fetched from the store, compared with the expected content, and counted.

A block counts once it is verified; no block counts after the first that is missing or wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace

from kvrelay.block.verify import verify_block
from kvrelay.connector.context import CopyBatch, JobContext
from kvrelay.connector.geometry import Geometry, LoadTarget
from kvrelay.connector.lookups import LookupAnswer
from kvrelay.engine.core.external import Load, Loaded, TransferEvent
from kvrelay.errors import Corrupt, DeadlineExceeded, KvrelayError
from kvrelay.usage import Miss
from kvstore import GetResult, Want
from kvstore.limits import MAX_NAMES
from kvstore.urls import public_url


def load_targets(load: Load, answer: LookupAnswer | None, geometry: Geometry) -> list[LoadTarget]:
    """The blocks that make up the range of ``load``, as the lookup found them.

    Without the lookup's answer, a block whose end is in the range counts as full and the rest as a
    partial block of exactly that length.
    """
    size, end = geometry.block_size, load.local + load.external
    known = answer if answer is not None and answer.length == len(load.tokens) else None
    lead = end // size if known is None else known.lead
    tail = end % size if known is None else known.tail
    targets = []
    for offset, block in enumerate(load.blocks):
        index = load.local // size + offset
        count = size if index < lead else tail if index == lead else 0
        if count == 0 or index * size >= end:
            break
        source = None if known is None else known.source(index)
        targets.append(geometry.target(load.tokens, load.names, index, count, block, source))
    return targets


class LoadJob:
    """One load on a thread of the connector; it ends with one ``Loaded``, given to ``end``.

    ``end`` is also given the blocks after a wrong one: they may be wrong too. Only one of ``run``,
    ``give_up`` and ``cancel`` may begin the end: the first that is called.
    """

    def __init__(
        self,
        context: JobContext,
        load: Load,
        targets: Sequence[LoadTarget],
        end: Callable[[TransferEvent, Sequence[LoadTarget]], None],
    ) -> None:
        self._context = context
        self._load = load
        self._targets = targets
        self._end = end
        self._give_up_at = time.monotonic() + context.options.queue_seconds
        self._deadline = self._give_up_at
        self._default_source = public_url(context.store.url)
        self._valid_to = load.local
        self._sources: dict[str, int] = {}  # tokens of valid blocks by store
        self._missed = Miss.UNKNOWN  # the reason, if the load ends short
        self._accepted = 0
        self._suspect: Sequence[LoadTarget] = ()
        self._lock = threading.Lock()
        self._claimed = False
        self._cancelled = False

    def run(self) -> None:
        """Get, verify and count until the end or the first failure."""
        if not self._claim():
            return
        try:
            self._begin()
            for batch in self._batches():
                if self._cancelled or not self._fill(batch):
                    break
        except Corrupt as error:
            self._context.meter.add(corrupt=1)
            self._suspect = self._targets[self._accepted + 1 :]
            other = error.field == "namespace"
            self._missed = Miss.OTHER_NAMESPACE if other else Miss.FAILED_VERIFICATION
        except DeadlineExceeded:
            self._context.meter.add(load_failures=1)
            self._missed = Miss.TOO_LATE
        except KvrelayError:
            self._context.meter.add(load_failures=1)
            self._missed = Miss.UNREACHABLE
        finally:
            self._finish()

    def give_up(self) -> None:
        """End with no valid tokens."""
        if self._claim():
            self._context.meter.add(load_failures=1)
            self._missed = Miss.UNREACHABLE
            self._finish()

    def cancel(self) -> bool:
        """End a load that has not begun, and let one that runs end before its next batch.

        Not in the middle of a batch: a store takes the block at which a reader stops for a wrong
        one. Returns whether no block will be written from now on.
        """
        self._context.meter.add(loads_cancelled=1)
        self._cancelled = True
        unbegun = self._claim()
        if unbegun:
            self._finish()
        return unbegun

    def _claim(self) -> bool:
        """Whether the load is the caller's to end."""
        with self._lock:
            first = not self._claimed
            self._claimed = True
        return first

    def _begin(self) -> None:
        now = time.monotonic()
        if now > self._give_up_at:
            raise DeadlineExceeded("the load waited too long for a thread")
        nbytes = sum(self._context.pool.nbytes(target.expected.count) for target in self._targets)
        self._deadline = now + self._context.options.load_timeout(nbytes)

    def _finish(self) -> None:
        load = self._load
        valid = min(self._valid_to - load.local, load.external)
        self._context.meter.add(
            open_loads=-1, loaded_tokens=valid, loads_short=valid < load.external
        )
        missed = self._missed if valid < load.external else None
        sources = tuple(self._sources.items())
        self._end(Loaded(load.request_id, load.epoch, valid, missed, sources), self._suspect)

    def _batches(self) -> Iterator[list[LoadTarget]]:
        """Batches within ``batch_bytes``, ``MAX_NAMES`` and what a device can copy at once."""
        batch: list[LoadTarget] = []
        nbytes = 0
        copies = self._context.copies
        most = MAX_NAMES if copies is None else min(MAX_NAMES, copies.most_blocks)
        for target in self._targets:
            size = self._context.pool.nbytes(target.expected.count)
            full = len(batch) == most or nbytes + size > self._context.options.batch_bytes
            if batch and full:
                yield batch
                batch, nbytes = [], 0
            batch.append(target)
            nbytes += size
        if batch:
            yield batch

    def _fill(self, targets: list[LoadTarget]) -> bool:
        """Fetch one batch; returns whether every block came and was right."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded("the load's time ran out between two batches")
        if (copies := self._context.copies) is not None:
            with copies.loading() as batch:
                return self._fill_device(targets, batch, remaining)
        wants = [self._want(target) for target in targets]
        with closing(self._context.store.get(wants, remaining)) as arriving:
            return all(self._accept(targets[g.index], wants[g.index], g) for g in arriving)

    def _fill_device(
        self, targets: Sequence[LoadTarget], batch: CopyBatch, remaining: float
    ) -> bool:
        """``_fill`` for a pool on a device: a block counts only after its copy has ended."""
        blocks = [TargetBlock(self._context, target, batch) for target in targets]
        right: list[tuple[TargetBlock, GetResult]] = []
        try:
            with closing(self._context.store.get([b.want for b in blocks], remaining)) as arriving:
                for got in arriving:
                    if got.header is None:
                        return self._absent()
                    blocks[got.index].receive(got)
                    right.append((blocks[got.index], got))
        finally:
            batch.settle()
            for block, got in right:
                self._count(block.target, block.want, got)
        return True

    def _absent(self) -> bool:
        self._context.meter.add(absent=1)
        self._missed = Miss.TOO_LATE  # the lookup had found it
        return False

    def _want(self, target: LoadTarget) -> Want:
        buffer = self._direct(target)
        if buffer is None:
            buffer = memoryview(bytearray(self._context.pool.nbytes(target.expected.count)))
        return _want(self._context, target, buffer)

    def _direct(self, target: LoadTarget) -> memoryview | None:
        """The pool block itself, if the payload fills it and it is in host memory."""
        if target.expected.count < self._context.pool.shape.block_size:
            return None
        return self._context.pool.buffer(target.block)

    def _accept(self, target: LoadTarget, want: Want, got: GetResult) -> bool:
        """Verify one block and count it; returns whether the store still had it."""
        if got.header is None:
            return self._absent()
        key = self._context.options.key
        verify_block(got.header, target.expected, want.buffer, got.summed, key)
        if self._direct(target) is None:
            self._context.pool.write(target.block, target.expected.count, want.buffer)
        self._count(target, want, got)
        return True

    def _count(self, target: LoadTarget, want: Want, got: GetResult) -> None:
        source = got.source or self._default_source
        last = self._load.local + self._load.external
        tokens = min(target.end, last) - self._valid_to
        self._sources[source] = self._sources.get(source, 0) + tokens
        self._valid_to = target.end
        self._accepted += 1
        self._context.meter.add(loaded_bytes=want.buffer.nbytes)


class TargetBlock:
    """One block of a batch, and the ``DeviceTarget`` of its want."""

    def __init__(self, context: JobContext, target: LoadTarget, batch: CopyBatch) -> None:
        self.target = target
        self._batch = batch
        self._key = context.options.key
        self._wrong: Corrupt | None = None
        count = target.expected.count
        slot = batch.slot()
        assert slot is not None  # a batch is no longer than its pinned memory
        buffer = slot[: context.pool.nbytes(count)]
        full = count == context.pool.shape.block_size
        self.want = replace(_want(context, target, buffer), device=self if full else None)

    def take(self, header: bytes, payload: memoryview) -> bool:
        """See ``DeviceTarget``. The transport checks the lease on the payload afterwards."""
        block, count = self.target.block, self.target.expected.count
        if self._batch.background:
            if not self._batch.load(block, count, payload):
                return False
            self._wrong = self._error(header, payload)
            return True
        self._wrong = self._error(header, payload)
        return self._wrong is not None or self._batch.load(block, count, payload)

    def _error(self, header: bytes, payload: memoryview) -> Corrupt | None:
        """What is wrong with a block."""
        try:
            verify_block(header, self.target.expected, payload, None, self._key)
        except Corrupt as error:
            return error
        return None

    def settle(self) -> None:
        self._batch.settle()

    def receive(self, got: GetResult) -> None:
        """Verify the block and start its copy, unless ``take`` did. Raises ``Corrupt``."""
        if got.taken:
            if self._wrong is not None:
                raise self._wrong
            return
        assert got.header is not None
        expected, buffer = self.target.expected, self.want.buffer
        verify_block(got.header, expected, buffer, got.summed, self._key)
        started = self._batch.load(self.target.block, expected.count, buffer)
        assert started  # its buffer is pinned


class RecheckJob:
    """Reads the blocks after a wrong one of a load that has ended; the store removes wrong ones.

    Without it a chain with many wrong blocks would heal one block a request. ``checked`` is called
    with each block after its check, and with all of them at the end.
    """

    def __init__(
        self,
        context: JobContext,
        targets: Sequence[LoadTarget],
        checked: Callable[[Sequence[LoadTarget]], None],
    ) -> None:
        self._context = context
        self._targets = targets
        self._checked = checked

    def run(self) -> None:
        """Stop reading at each wrong block, which makes the store verify it."""
        pool, options = self._context.pool, self._context.options
        nbytes = sum(pool.nbytes(target.expected.count) for target in self._targets)
        deadline = time.monotonic() + options.load_timeout(nbytes)
        try:
            with suppress(KvrelayError):
                for target in self._targets:
                    self._check(target, deadline - time.monotonic())
                    self._checked([target])
        finally:
            self._checked(self._targets)

    def give_up(self) -> None:
        """End without a check."""
        self._checked(self._targets)

    def _check(self, target: LoadTarget, timeout: float) -> None:
        buffer = memoryview(bytearray(self._context.pool.nbytes(target.expected.count)))
        want = _want(self._context, target, buffer)
        with closing(self._context.store.get([want], timeout)) as arriving:
            for got in arriving:
                if got.header is not None and self._is_wrong(
                    got.header, target, buffer, got.summed
                ):
                    return

    def _is_wrong(
        self,
        header: bytes,
        target: LoadTarget,
        payload: memoryview,
        summed: tuple[int, ...] | None,
    ) -> bool:
        try:
            verify_block(header, target.expected, payload, summed, self._context.options.key)
        except Corrupt:
            return True
        return False


def _want(context: JobContext, target: LoadTarget, buffer: memoryview) -> Want:
    expected, key = target.expected, context.options.key
    partial = expected.count < context.pool.shape.block_size
    heads = 0 if key is not None else expected.heads
    return Want(expected.name, buffer, target.source, partial, key, heads)
