"""A save: the store is offered blocks and takes those it lacks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import takewhile

from kvrelay.block.header import encode_fields, header_bytes
from kvrelay.connector.context import CopiedBlock, CopyBatch, JobContext
from kvrelay.connector.geometry import Geometry
from kvrelay.engine.core.external import BlockContent, Save, Saved, TransferEvent
from kvrelay.errors import KvrelayError
from kvstore import Block, Offer, Outcome, PutStatus


class SaveJob:
    """One save on a thread of the connector: calls ``begin`` first and ``end`` once."""

    def __init__(
        self,
        context: JobContext,
        save: Save,
        geometry: Geometry,
        begin: Callable[[Save], None],
        end: Callable[[TransferEvent], None],
    ) -> None:
        self._context = context
        self._save = save
        self._geometry = geometry
        self._begin = begin
        self._end = end
        self._sizes = [context.pool.nbytes(len(content.tokens)) for content in save.contents]
        self._stored = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the payloads."""
        return sum(self._sizes)

    def run(self) -> None:
        """Offer every block; those the store lacks are read from the pool as they are sent."""
        copies = self._context.copies
        self._begin(self._save)
        timeout = self._context.options.save_timeout(self.nbytes)
        try:
            with nullcontext() if copies is None else copies.saving() as batch:
                offers = [self._offer(content, batch) for content in self._save.contents]
                self._count(self._context.store.put(offers, timeout))
        except KvrelayError:
            self._context.meter.add(save_failures=1)
        finally:
            self._finish()

    def give_up(self) -> None:
        """End with nothing stored."""
        self._context.meter.add(save_failures=1)
        self._finish()

    def _finish(self) -> None:
        save = self._save
        self._context.meter.add(open_saves=-1, open_save_bytes=-self.nbytes)
        self._end(Saved(save.request_id, save.epoch, save.serial, self._stored))

    def _offer(self, content: BlockContent, batch: CopyBatch | None) -> Offer:
        count = len(content.tokens)
        pool = self._context.pool
        size = header_bytes(count, pool.shape.num_kv_heads) + pool.nbytes(count)
        partial = count < self._geometry.block_size
        first = self._geometry.first_block_hash(content)
        device = None if batch is None else BlockOnDevice(batch, content, pool.nbytes(count))
        return Offer(
            content.name,
            size,
            partial,
            lambda: self._block(content, device),
            first,
            content.parent,
            device=device,
        )

    def _block(self, content: BlockContent, device: BlockOnDevice | None) -> Block:
        copied = None if device is None else device.take()
        payload = (
            self._context.pool.read(content.block, len(content.tokens))
            if copied is None
            else copied.payload
        )
        block = self._geometry.block(content.parent, content.name, content.tokens)
        header = encode_fields(block, payload.nbytes, None)
        placed = copied is not None and copied.placed
        return Block(header, payload, sealed=False, key=self._context.options.key, placed=placed)

    def _count(self, outcomes: list[Outcome]) -> None:
        self._stored = sum(1 for _ in takewhile(lambda outcome: outcome.present, outcomes))
        written = [
            size
            for size, outcome in zip(self._sizes, outcomes, strict=True)
            if outcome.status is PutStatus.STORED
        ]
        self._context.meter.add(
            saved_blocks=len(written),
            existing_blocks=sum(outcome.status is PutStatus.EXISTED for outcome in outcomes),
            refused_blocks=sum(not outcome.present for outcome in outcomes),
            saved_bytes=sum(written),
        )


class BlockOnDevice:
    """A ``DeviceSource``. A copy is read once, and only in the turn of the batch that made it."""

    def __init__(self, batch: CopyBatch, content: BlockContent, nbytes: int) -> None:
        self._batch = batch
        self._content = content
        self._nbytes = nbytes
        self._copied: CopiedBlock | None = None

    def start(self, target: memoryview | None) -> bool:
        content = self._content
        part = None if target is None else target[len(target) - self._nbytes :]
        self._copied = self._batch.save(content.block, len(content.tokens), part)
        return self._copied is not None

    def settle(self) -> None:
        self._batch.settle()

    def recycle(self) -> None:
        self._batch.recycle()

    def take(self) -> CopiedBlock | None:
        """The copy of this turn; ``None`` if there is none or it was read already."""
        copied = self._copied
        self._copied = None
        return copied if copied is not None and copied.turn == self._batch.turn else None
