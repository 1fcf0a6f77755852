"""``redis://`` and its kin: blocks in Redis, one value each, in the format of every store.

Redis evicts and expires; it counts no leases. What a lookup finds lives on for as long as a block
lives that is used, and a value that is read is whole, or it is absent.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence

from kvrelay.errors import KvrelayError
from kvrelay.rpc.deadline import Deadline
from kvstore.base import (
    GetResult,
    Lease,
    LookupResult,
    Offer,
    Outcome,
    PutStatus,
    SurveyResult,
    Tail,
    Want,
)
from kvstore.redis.admin import clear_all, remove_if_wrong, reports_of, stats_of
from kvstore.redis.call import RedisCall
from kvstore.redis.counters import ClientCounters
from kvstore.redis.reads import read_blocks
from kvstore.redis.settings import RedisSettings
from kvstore.redis.survey import RedisSurvey, survey_blocks
from kvstore.redis.topology import Topology
from kvstore.redis.writes import PutOperation
from kvstore.stats import StoreStats

log = logging.getLogger("kvrelay.store")

MEND_SECONDS = 1.0


class RedisStore:
    """A ``Store``. Connects when first used and again whenever it must."""

    def __init__(self, settings: RedisSettings) -> None:
        self.url = settings.url
        self._settings = settings
        self._topology = Topology(settings)
        self._counting = ClientCounters()

    def lookup(
        self,
        names: Sequence[bytes],
        tails: Sequence[Tail],
        ttl: float,
        timeout: float,
        openings: Sequence[int] = (),
    ) -> LookupResult:
        """As the protocol says. Of a block that is not there Redis cannot tell why."""
        full = len(names)
        seen = self._survey([*names, *(tail.name for tail in tails)], full, ttl, timeout)
        lead = next((i for i in range(full) if seen.sizes[i] is None), full)
        fits = [i for i, t in enumerate(tails) if t.after == lead]
        tail = next((i for i in fits if seen.sizes[full + i] is not None), None)
        found = [*range(lead), *([] if tail is None else [full + tail])]
        self._counting.add(lookups=1, hits=len(found), misses=full - lead)
        first = lead if lead < full else full + fits[0] if fits else None
        return LookupResult(
            lead,
            tail,
            sizes=tuple(seen.sizes[i] or 0 for i in found),
            lease=seen.lease(found),
            missing=None if tail is not None or first is None else seen.why(first),
        )

    def survey(
        self, names: Sequence[bytes], ttl: float, timeout: float, openings: Sequence[int] = ()
    ) -> SurveyResult:
        """As the protocol says. A partial block lives on as a full one does: both look the same."""
        seen = self._survey(names, len(names), ttl, timeout)
        found = [i for i, size in enumerate(seen.sizes) if size is not None]
        self._counting.add(lookups=1, hits=len(found), misses=len(names) - len(found))
        misses = tuple(None if size else seen.why(i) for i, size in enumerate(seen.sizes))
        return SurveyResult(seen.sizes, seen.lease(found), misses)

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        """As the protocol says."""
        deadline = Deadline.after(timeout)
        served = absent = nbytes = 0
        got = None
        try:
            with self._call(timeout) as call:
                for got in read_blocks(call, wants):
                    if got.header is None:
                        absent += 1
                    else:
                        served += 1
                        nbytes += len(got.header) + wants[got.index].buffer.nbytes
                    yield got
        except GeneratorExit:
            if got is not None:
                self._mend(wants[got.index].name, deadline)
            raise
        finally:
            self._counting.add(served=served, absent=absent, bytes_out=nbytes)

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        """As the protocol says, but that a block another writer is putting is put once more."""
        with self._call(timeout) as call:
            outcomes = PutOperation(call, offers, self._settings).run()
        kept = [outcome.status for outcome in outcomes]
        self._counting.add(
            stored=kept.count(PutStatus.STORED),
            existed=kept.count(PutStatus.EXISTED),
            rejected=kept.count(PutStatus.NO_ROOM),
            corrupt=kept.count(PutStatus.CORRUPT),
            bytes_in=sum(
                o.size for o, k in zip(offers, kept, strict=True) if k is PutStatus.STORED
            ),
        )
        return outcomes

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        """Nothing: a block expires some time after it was last used, and makes room before that."""

    def stats(self, timeout: float) -> StoreStats:
        """What the servers say, with whatever else they keep, and what this client did."""
        deadline = Deadline.after(timeout)
        self._topology.prepare(deadline)
        return stats_of(
            reports_of(self._topology, self._settings, deadline), self._counting.counters()
        )

    def clear(self, timeout: float) -> int:
        """Remove every block with this store's prefix, also those somebody is about to read."""
        deadline = Deadline.after(timeout)
        self._topology.prepare(deadline)
        removed = clear_all(self._topology, self._settings, deadline)
        self._counting.add(cleared=removed)
        return removed

    def close(self) -> None:
        """As the protocol says."""
        self._topology.close()

    def _call(self, timeout: float) -> RedisCall:
        return RedisCall(self._topology, Deadline.after(timeout), self._settings.cluster)

    def _mend(self, name: bytes, deadline: Deadline) -> None:
        """A reader left at this block. If what lies there is wrong it goes, and may be put anew."""
        place = self._topology.place(name, lambda node: not node.circuit.open)
        try:
            if place and remove_if_wrong(
                place, name, self._settings, deadline.earlier(MEND_SECONDS)
            ):
                self._counting.add(corrupt=1)
        except KvrelayError as error:
            log.info("%s: block %s was not looked at again: %s", self.url, name.hex(), error)

    def _survey(self, names: Sequence[bytes], full: int, ttl: float, timeout: float) -> RedisSurvey:
        with self._call(timeout) as call:
            return survey_blocks(call, names, full, ttl, self._settings)
