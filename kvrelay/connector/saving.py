"""A save: the store is offered blocks and takes those it lacks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from kvrelay.block.header import encode_fields, header_bytes
from kvrelay.connector.context import JobContext
from kvrelay.connector.geometry import Geometry
from kvrelay.engine.core.external import BlockContent, Save, Saved, TransferEvent
from kvrelay.errors import KvrelayError
from kvstore import Block, Offer, Outcome, PutStatus


class SaveJob:
    """One save on a thread of the connector; it ends with one ``Saved``, given to ``end``."""

    def __init__(
        self,
        context: JobContext,
        save: Save,
        geometry: Geometry,
        end: Callable[[TransferEvent], None],
    ) -> None:
        self._store = context.store
        self._pool = context.pool
        self._options = context.options
        self._meter = context.meter
        self._save = save
        self._geometry = geometry
        self._end = end
        self._sizes = [self._pool.nbytes(len(content.tokens)) for content in save.contents]
        self._stored = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the payloads."""
        return sum(self._sizes)

    def run(self) -> None:
        """Offer every block; those the store lacks are read from the pool as they are sent."""
        try:
            offers = [self._offer(content) for content in self._save.contents]
            self._count(self._store.put(offers, self._options.save_timeout(self.nbytes)))
        except KvrelayError:
            self._meter.add(save_failures=1)
        finally:
            self._finish()

    def give_up(self) -> None:
        """End with nothing stored."""
        self._meter.add(save_failures=1)
        self._finish()

    def _finish(self) -> None:
        save = self._save
        self._meter.add(open_saves=-1, open_save_bytes=-self.nbytes)
        self._end(Saved(save.request_id, save.epoch, save.serial, self._stored))

    def _offer(self, content: BlockContent) -> Offer:
        count = len(content.tokens)
        size = header_bytes(count) + self._pool.nbytes(count)
        partial = count < self._geometry.block_size
        first = self._geometry.first_block_hash(content)
        return Offer(content.name, size, partial, lambda: self._block(content), first)

    def _block(self, content: BlockContent) -> Block:
        count = len(content.tokens)
        payload = self._pool.read(content.block, count)
        header = encode_fields(
            self._geometry.namespace,
            content.parent,
            content.name,
            content.tokens,
            self._geometry.dtype,
            self._geometry.shape(count),
            payload.nbytes,
            0,
        )
        return Block(header, payload, sealed=False)

    def _count(self, outcomes: list[Outcome]) -> None:
        self._stored = sum(1 for _ in takewhile(lambda outcome: outcome.present, outcomes))
        results = [outcome.status for outcome in outcomes]
        written = [
            size
            for size, result in zip(self._sizes, results, strict=True)
            if result is PutStatus.STORED
        ]
        self._meter.add(
            saved_blocks=len(written),
            existing_blocks=results.count(PutStatus.EXISTED),
            refused_blocks=sum(not outcome.present for outcome in outcomes),
            saved_bytes=sum(written),
        )
