"""``redis://`` and the like: blocks in Redis, one value each, in the format of every store.

Redis evicts and expires; it has no leases. A lookup with a lease resets the expiry of what it
finds. A value comes whole, or it is absent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from kvrelay.errors import KvrelayError
from kvrelay.rpc.deadline import Deadline
from kvrelay.usage import Miss
from kvstore.base import (
    GetResult,
    Lease,
    LookupResult,
    NameQuery,
    Offer,
    Outcome,
    PutStatus,
    SurveyResult,
    Want,
)
from kvstore.redis.admin import clear_all, remove_if_wrong, reports_of, stats_of
from kvstore.redis.call import WRONG_TYPE, RedisCall, error_code
from kvstore.redis.reads import read_blocks
from kvstore.redis.settings import RedisSettings
from kvstore.redis.topology import Topology
from kvstore.redis.writes import PutOperation
from kvstore.stats import StoreCounters, StoreStats

log = logging.getLogger("kvrelay.store")

RECHECK_SECONDS = 1.0

BOOT = b"redis"
"""Of every lease: a lease names no places, so none is stale after a restart of a server."""


class RedisStore:
    """A ``Store``. It connects on first use and reconnects when needed."""

    def __init__(self, settings: RedisSettings) -> None:
        self.url = settings.url
        self._settings = settings
        self._topology = Topology(settings)
        self._counters = _Counters()

    def lookup(self, query: NameQuery, timeout: float) -> LookupResult:
        """The reason of a miss is unknown: Redis does not record it."""
        full = len(query.names)
        names = [*query.names, *(tail.name for tail in query.tails)]
        seen = self._survey(names, full, query.ttl, timeout)
        lead = next((i for i in range(full) if seen.sizes[i] is None), full)
        fits = [i for i, t in enumerate(query.tails) if t.after == lead]
        tail = next((i for i in fits if seen.sizes[full + i] is not None), None)
        present = [*range(lead), *([] if tail is None else [full + tail])]
        self._counters.add(lookups=1, hits=len(present), misses=full - lead)
        first = lead if lead < full else full + fits[0] if fits else None
        return LookupResult(
            lead,
            tail,
            sizes=tuple(seen.sizes[i] or 0 for i in present),
            lease=seen.lease(present),
            missing=None if tail is not None or first is None else seen.why(first),
        )

    def survey(self, query: NameQuery, timeout: float) -> SurveyResult:
        """A partial block is kept as long as a full one: their names do not differ."""
        names = query.names
        seen = self._survey(names, len(names), query.ttl, timeout)
        present = [i for i, size in enumerate(seen.sizes) if size is not None]
        self._counters.add(lookups=1, hits=len(present), misses=len(names) - len(present))
        misses = tuple(None if size else seen.why(i) for i, size in enumerate(seen.sizes))
        return SurveyResult(seen.sizes, seen.lease(present), misses)

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        deadline = Deadline.after(timeout)
        served = absent = nbytes = 0
        got = None
        try:
            with self._call(timeout) as call:
                for got in read_blocks(call, wants):
                    if not got.header:
                        absent += 1
                    else:
                        served += 1
                        nbytes += len(got.header) + wants[got.index].buffer.nbytes
                    yield got
        except GeneratorExit:
            if got is not None:
                self._recheck(wants[got.index], deadline)
            raise
        finally:
            self._counters.add(served=served, absent=absent, bytes_out=nbytes)

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        """A block that another writer is putting is not waited for, but sent as well."""
        with self._call(timeout) as call:
            outcomes = PutOperation(call, offers, self._settings).run()
        kept = [outcome.status for outcome in outcomes]
        self._counters.add(
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
        """Nothing: a block expires some time after its last use, or is evicted before that."""

    def stats(self, timeout: float) -> StoreStats:
        """The servers' figures, which count other keys too, and what this client did."""
        deadline = Deadline.after(timeout)
        self._topology.prepare(deadline)
        reports = reports_of(self._topology, self._settings, deadline)
        return stats_of(reports, self._counters.read())

    def clear(self, timeout: float) -> int:
        """Remove every block with this store's prefix, also those found by a lookup with lease."""
        deadline = Deadline.after(timeout)
        self._topology.prepare(deadline)
        removed = clear_all(self._topology, self._settings, deadline)
        self._counters.add(cleared=removed)
        return removed

    def close(self) -> None:
        self._topology.close()

    def _call(self, timeout: float) -> RedisCall:
        return RedisCall(self._topology, Deadline.after(timeout), self._settings.cluster)

    def _recheck(self, want: Want, deadline: Deadline) -> None:
        """A reader left at this block: remove the value if it is wrong. Failures are logged."""
        name = want.name
        place = self._topology.place(name, lambda server: not server.breaker.open)
        if place is None:
            return
        try:
            limit = deadline.earlier(RECHECK_SECONDS)
            if remove_if_wrong(place, want, self._settings, limit):
                self._counters.add(corrupt=1)
        except KvrelayError as error:
            log.info("%s: block %s was not verified again: %s", self.url, name.hex(), error)

    def _survey(self, names: Sequence[bytes], full: int, ttl: float, timeout: float) -> _Survey:
        """The first ``full`` names are of full blocks. With a ``ttl`` their expiry is reset."""
        lives = self._settings.lives(False), self._settings.lives(True)

        def request(index: int, key: bytes) -> bytes:
            named = b"$%d\r\n%b\r\n" % (len(key), key)
            if not ttl:
                return b"*2\r\n$6\r\nSTRLEN\r\n" + named
            life = lives[index >= full]
            prolonged = b"*3\r\n$7\r\nPEXPIRE\r\n%b$%d\r\n%b\r\n" % (named, len(life), life)
            return b"*2\r\n$6\r\nSTRLEN\r\n%b%b" % (named, prolonged)

        with self._call(timeout) as call:
            asked = time.monotonic()
            answers = call.ask(names, request, 2 if ttl else 1)
        held = self._settings.life, self._settings.partial_life
        return _Survey(
            tuple(None if answer is None else _size(answer) for answer in answers),
            frozenset(index for index, answer in enumerate(answers) if answer is None),
            full,
            (asked + min(ttl, held[0]), asked + min(ttl, held[1])) if ttl else None,
        )


@dataclass(frozen=True, slots=True)
class _Survey:
    """Bytes of each block, ``None`` if it is absent; no server answered for ``silent`` ones.

    The first ``full`` of those found are kept until ``until[0]``, the others until ``until[1]``.
    """

    sizes: tuple[int | None, ...]
    silent: frozenset[int]
    full: int
    until: tuple[float, float] | None

    def lease(self, present: Sequence[int]) -> Lease | None:
        """Of the blocks with these indices, which are kept so long unless they are evicted."""
        if not present or self.until is None:
            return None
        return Lease(1, BOOT, min(self.until[index >= self.full] for index in present))

    def why(self, index: int) -> Miss:
        """The reason why a block is absent."""
        return Miss.UNREACHABLE if index in self.silent else Miss.UNKNOWN


def _size(answer: list[bytes]) -> int | None:
    """From ``:LENGTH`` and, if its expiry was reset, ``:1``; an absent key has the length 0.

    A value that is empty or no string counts as one byte: its reader refuses and removes it. If it
    counted as absent, no reader would, and no block could be put in its place.
    """
    if not answer or answer[-1] == b":0":
        return None
    if error_code(answer[0]) == WRONG_TYPE:
        return 1
    length = answer[0][1:]
    if not length.isdigit() or (length == b"0" and len(answer) == 1):
        return None
    return max(int(length), 1)


class _Counters:
    """What this client did: Redis itself counts no blocks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = StoreCounters()

    def add(self, **counts: int) -> None:
        """To the fields of ``StoreCounters``."""
        with self._lock:
            for name, count in counts.items():
                setattr(self._counters, name, getattr(self._counters, name) + count)

    def read(self) -> StoreCounters:
        """A copy."""
        with self._lock:
            return replace(self._counters)
