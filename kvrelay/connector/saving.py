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
        self._context = context
        self._save = save
        self._geometry = geometry
        self._end = end
        self._sizes = [context.pool.nbytes(len(content.tokens)) for content in save.contents]
        self._stored = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the payloads."""
        return sum(self._sizes)

    def run(self) -> None:
        """Offer every block; those the store lacks are read from the pool as they are sent."""
        try:
            offers = [self._offer(content) for content in self._save.contents]
            timeout = self._context.options.save_timeout(self.nbytes)
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

    def _offer(self, content: BlockContent) -> Offer:
        count = len(content.tokens)
        pool = self._context.pool
        size = header_bytes(count, pool.shape.num_kv_heads) + pool.nbytes(count)
        partial = count < self._geometry.block_size
        first = self._geometry.first_block_hash(content)
        return Offer(
            content.name, size, partial, lambda: self._block(content), first, content.parent
        )

    def _block(self, content: BlockContent) -> Block:
        payload = self._context.pool.read(content.block, len(content.tokens))
        block = self._geometry.block(content.parent, content.name, content.tokens)
        header = encode_fields(block, payload.nbytes, None)
        return Block(header, payload, sealed=False, key=self._context.options.key)

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
