"""A save under way: the store is told what there is and takes what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from kvrelay.block.header import encoded, header_bytes
from kvrelay.connector.counters import Meter
from kvrelay.connector.geometry import Geometry
from kvrelay.connector.loading import Pool
from kvrelay.connector.options import ConnectorOptions
from kvrelay.engine.core.external import BlockContent, Save, Saved, TransferEvent
from kvrelay.errors import KvrelayError
from kvstore import Block, Offer, Outcome, PutStatus, Store


class SaveJob:
    """A job of a lane of saves; its end is one ``Saved``."""

    def __init__(
        self,
        save: Save,
        store: Store,
        pool: Pool,
        geometry: Geometry,
        options: ConnectorOptions,
        meter: Meter,
        end: Callable[[TransferEvent], None],
    ) -> None:
        self._save = save
        self._store = store
        self._pool = pool
        self._geometry = geometry
        self._options = options
        self._meter = meter
        self._end = end
        self._stored = 0
        self.nbytes = sum(pool.nbytes(len(piece.tokens)) for piece in save.contents)

    def run(self) -> None:
        """Offer every piece; those wanted are read from the pool as they are sent."""
        try:
            offers = [self._offer(piece) for piece in self._save.contents]
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

    def _offer(self, piece: BlockContent) -> Offer:
        count = len(piece.tokens)
        size = header_bytes(count) + self._pool.nbytes(count)
        partial = count < self._geometry.block_size
        opening = self._geometry.opening(piece)
        return Offer(piece.name, size, partial, lambda: self._block(piece), opening)

    def _block(self, piece: BlockContent) -> Block:
        payload = self._pool.read(piece.block, len(piece.tokens))
        geometry, count = self._geometry, len(piece.tokens)
        header = encoded(
            geometry.namespace,
            piece.parent,
            piece.name,
            piece.tokens,
            geometry.dtype,
            geometry.shape(count),
            payload.nbytes,
            0,
        )
        return Block(header, payload, sealed=False)

    def _count(self, outcomes: list[Outcome]) -> None:
        self._stored = sum(1 for _ in takewhile(lambda outcome: outcome.present, outcomes))
        kept = [outcome.kept for outcome in outcomes]
        sizes = (self._pool.nbytes(len(piece.tokens)) for piece in self._save.contents)
        self._meter.add(
            saved_blocks=kept.count(PutStatus.STORED),
            existing_blocks=kept.count(PutStatus.EXISTED),
            refused_blocks=sum(not outcome.present for outcome in outcomes),
            saved_bytes=sum(
                size for size, k in zip(sizes, kept, strict=True) if k is PutStatus.STORED
            ),
        )
