"""``kvrelay://HOST:PORT``: the store as a service. gRPC finds and reserves; bytes go the best way.

``?way=shm``, ``lane`` or ``grpc`` forces one. Blocks that together are small are sent without
asking first, large ones only if the store wants them. A way that breaks is left for the next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing

from kvrelay.errors import Corrupt, DeadlineExceeded, KvrelayError, Rejected, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import (
    GetResult,
    Lease,
    LookupResult,
    Offer,
    Outcome,
    PutStatus,
    SurveyResult,
    Want,
)
from kvstore.claims import Tail
from kvstore.client.calls import StoreCalls, mapped_errors
from kvstore.client.transports.base import GetProgress, Transport
from kvstore.client.transports.grants import PutGrant, abandoned_on_error, reserve_request
from kvstore.client.transports.grpc_transport import buffers_of
from kvstore.client.transports.selector import TRANSPORTS, TransportSelector
from kvstore.stats import StoreStats
from kvstore.wire.messages import claim_message, miss_of, outcomes_of, stats_of

log = logging.getLogger("kvrelay.store")

SEND_UNASKED = 256 << 10
"""Up to so many bytes in all a round trip costs more than sending in vain."""

GRACE = 0.05
"""With less time left than this, another writer is not waited for any more."""

RECHECK_SECONDS = 1.0
"""For the store to look again at a block that a reader left at."""


class RemoteStore:
    """A ``Store``. Connects when first used and again whenever it must."""

    def __init__(self, address: str, way: str | None = None) -> None:
        if way is not None and way not in TRANSPORTS:
            raise Rejected("way", f"{way!r} is none of {', '.join(TRANSPORTS)}")
        self.url = f"kvrelay://{address}" + (f"?way={way}" if way else "")
        self._calls = StoreCalls(address)
        self._ways = TransportSelector(address, self._calls, way)
        self._closed = threading.Event()

    @property
    def used(self) -> dict[str, int]:
        """How many calls began on each way."""
        return dict(self._ways.used)

    @property
    def breaks(self) -> dict[str, int]:
        """How often each way broke in the middle of a call."""
        return dict(self._ways.breaks)

    def lookup(
        self,
        names: Sequence[bytes],
        tails: Sequence[Tail],
        ttl: float,
        timeout: float,
        openings: Sequence[int] = (),
    ) -> LookupResult:
        """As the protocol says."""
        request = pb.LookupRequest(
            names=names,
            tails=[pb.Tail(after=tail.after, name=tail.name) for tail in tails],
            lease_ms=round(ttl * 1000),
            first_block_hashes=openings,
        )
        answer, lease = self._ask(request, timeout)
        return LookupResult(
            lead=answer.lead,
            tail=answer.tail if answer.HasField("tail") else None,
            sizes=tuple(answer.lengths),
            lease=lease,
            missing=miss_of(answer.first_miss),
            boot=answer.boot,
        )

    def survey(
        self, names: Sequence[bytes], ttl: float, timeout: float, openings: Sequence[int] = ()
    ) -> SurveyResult:
        """As the protocol says."""
        request = pb.LookupRequest(
            names=names, lease_ms=round(ttl * 1000), each=True, first_block_hashes=openings
        )
        answer, lease = self._ask(request, timeout)
        lengths = answer.lengths
        if len(lengths) != len(names):
            raise Corrupt("lengths", f"{len(lengths)} came for {len(names)} names")
        misses = tuple(map(miss_of, answer.misses))
        sizes = tuple(length or None for length in lengths)
        return SurveyResult(sizes, lease, misses, answer.first_block_known)

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        """As the protocol says. The store looks again at a block where its reader leaves."""
        deadline, got = Deadline.after(timeout), None
        try:
            with closing(self._arriving(wants, deadline)) as arriving:
                for got in arriving:
                    yield got
        except GeneratorExit:
            if got is not None and got.header is not None:
                self._recheck(wants[got.index].name, deadline.earlier(RECHECK_SECONDS))
            raise

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        """As the protocol says."""
        deadline = Deadline.after(timeout)
        tried: set[str] = set()
        if sum(offer.size for offer in offers) <= SEND_UNASKED:
            outcomes = self._send_small(offers, deadline)
        else:
            outcomes = self._put_asked(offers, 0.0, deadline, tried)
        late = [i for i, outcome in enumerate(outcomes) if outcome.kept is PutStatus.PENDING]
        while late and deadline.remaining() > GRACE:
            try:
                again = self._put_asked(
                    [offers[i] for i in late], deadline.remaining(), deadline, tried
                )
            except DeadlineExceeded:
                break  # they are still pending when the time is over
            for i, outcome in zip(late, again, strict=True):
                outcomes[i] = outcome
            late = [i for i in late if outcomes[i].kept is PutStatus.PENDING]
        return outcomes

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        """As the protocol says."""
        with mapped_errors():
            for boot in {lease.boot for lease in leases}:
                ids = [lease.id for lease in leases if lease.boot == boot]
                self._calls.release(pb.ReleaseRequest(boot=boot, leases=ids), timeout=timeout)

    def stats(self, timeout: float) -> StoreStats:
        """As the protocol says."""
        with mapped_errors():
            return stats_of(self._calls.stats(pb.GetStatsRequest(), timeout=timeout))

    def clear(self, timeout: float) -> int:
        """As the protocol says."""
        with mapped_errors():
            return self._calls.clear(pb.ClearRequest(), timeout=timeout).removed

    def close(self) -> None:
        """As the protocol says."""
        self._closed.set()
        self._calls.close()
        self._ways.close()

    def _arriving(
        self, wants: Sequence[Want], deadline: Deadline
    ) -> Generator[GetResult, None, None]:
        """The blocks, by one way after another."""
        progress = GetProgress()
        tried: set[str] = set()
        while True:
            way = self._ways.best(tried, deadline)
            try:
                yield from way.get(wants, progress, deadline)
                return
            except (Unavailable, Corrupt) as error:
                self._after(way, error, tried)

    def _recheck(self, name: bytes, deadline: Deadline) -> None:
        """If what lies there is wrong it goes, and may be put anew. A failure is nobody's loss."""
        try:
            with mapped_errors():
                self._calls.recheck(pb.RecheckRequest(name=name), timeout=deadline.remaining())
        except KvrelayError as error:
            log.info("%s: block %s was not looked at again: %s", self.url, name.hex(), error)

    def _ask(
        self, request: pb.LookupRequest, timeout: float
    ) -> tuple[pb.LookupResponse, Lease | None]:
        asked = time.monotonic()
        with mapped_errors():
            answer = self._calls.lookup(request, timeout=timeout)
        self._ways.started(answer.boot)
        lease = Lease(answer.lease, answer.boot, asked + answer.lease_ms / 1000)
        return answer, lease if answer.lease else None

    def _after(self, way: Transport, error: KvrelayError, tried: set[str]) -> None:
        """A way has failed: raise, or return to have the next one tried."""
        if self._closed.is_set():
            raise Unavailable("this store was closed") from error
        if way.name == TRANSPORTS[-1]:
            raise error
        self._ways.broke(way, error)
        tried.add(way.name)

    def _put_asked(
        self, offers: Sequence[Offer], wait: float, deadline: Deadline, tried: set[str]
    ) -> list[Outcome]:
        """Ask which are wanted, waiting up to ``wait`` for other writers, and send those.

        When a way breaks, all counts as being written still: what it brought will be there when
        asked again, and the rest is free once the store has noticed.
        """
        granted: PutGrant | None = None
        if wait:
            # Half the wait at most: when it is over, there must be time to send.
            granted = PutGrant(
                self._calls.claim(reserve_request(offers, wait / 2), deadline), offers
            )
            if not granted.wanted:
                return granted.outcomes(iter(()))
        way = self._ways.best(tried, deadline)
        try:
            if granted is None:
                return way.put(offers, deadline)
            with abandoned_on_error(self._calls, granted, deadline):
                return way.send(granted, deadline)
        except (Unavailable, Corrupt) as error:
            self._after(way, error, tried)
            return [Outcome(PutStatus.PENDING)] * len(offers)

    def _send_small(self, offers: Sequence[Offer], deadline: Deadline) -> list[Outcome]:
        if not offers:
            return []
        head = pb.PutHead(claims=[claim_message(offer) for offer in offers])
        request = pb.PutSmallRequest(head=head, data=b"".join(buffers_of(offers)))
        with mapped_errors():
            answer = self._calls.put_small(request, timeout=deadline.remaining())
        return outcomes_of(answer, len(offers))
