"""``kvrelay://HOST:PORT``: the store service. gRPC locates and reserves; a transport carries bytes.

``?transport=shm``, ``socket`` or ``grpc`` forces one. Blocks that are small in all are sent without
asking first, others only if the store wants them. When a transport fails, the next one continues.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing

from kvrelay.errors import Corrupt, DeadlineExceeded, KvrelayError, Rejected, Unavailable
from kvrelay.rpc import tracing
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import store_pb2 as pb
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
from kvstore.client.calls import StoreCalls, mapped_errors, trace
from kvstore.client.traced import TRANSPORT
from kvstore.client.transports.base import GetProgress, Transport
from kvstore.client.transports.grants import PutGrant, abandoned_on_error, reserve_request
from kvstore.client.transports.grpc_transport import buffers_of
from kvstore.client.transports.selector import TRANSPORTS, TransportSelector
from kvstore.device import MemoryRegistrar
from kvstore.stats import StoreStats
from kvstore.wire.messages import claim_message, miss_of, outcomes_of, stats_of

log = logging.getLogger("kvrelay.store")

SEND_UNASKED = 256 << 10
"""Below this total, a round trip costs more than sending blocks that the store does not need."""

GRACE = 0.05
"""With less time left, the client does not wait for other writers."""

RECHECK_SECONDS = 1.0
"""For the store to verify the block after which a reader stopped."""


class RemoteStore:
    """A ``Store``. It connects on first use and reconnects when needed."""

    def __init__(
        self,
        address: str,
        transport: str | None = None,
        registrar: MemoryRegistrar | None = None,
    ) -> None:
        if transport is not None and transport not in TRANSPORTS:
            raise Rejected("transport", f"{transport!r} is none of {', '.join(TRANSPORTS)}")
        self.url = f"kvrelay://{address}" + (f"?transport={transport}" if transport else "")
        self._calls = StoreCalls(address)
        self._transports = TransportSelector(address, self._calls, transport, registrar)
        self._closed = threading.Event()

    @property
    def used(self) -> dict[str, int]:
        """How many calls began on each transport."""
        return dict(self._transports.used)

    @property
    def breaks(self) -> dict[str, int]:
        """How often each transport failed during a call."""
        return dict(self._transports.breaks)

    def lookup(self, query: NameQuery, timeout: float) -> LookupResult:
        answer, lease = self._ask(query, timeout, each=False)
        return LookupResult(
            lead=answer.lead,
            tail=answer.tail if answer.HasField("tail") else None,
            sizes=tuple(answer.lengths),
            lease=lease,
            missing=miss_of(answer.first_miss),
            boot=answer.boot,
        )

    def survey(self, query: NameQuery, timeout: float) -> SurveyResult:
        answer, lease = self._ask(query, timeout, each=True)
        if len(answer.lengths) != len(query.names):
            raise Corrupt("lengths", f"got {len(answer.lengths)} for {len(query.names)} names")
        return SurveyResult(
            sizes=tuple(length or None for length in answer.lengths),
            lease=lease,
            misses=tuple(map(miss_of, answer.misses)),
            first_block=miss_of(answer.first_block),
        )

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[GetResult, None, None]:
        """The store verifies the block after which the reader stops."""
        deadline = Deadline.after(timeout)
        got = None
        try:
            with closing(self._arriving(wants, deadline)) as arriving:
                for got in arriving:
                    yield got
        except GeneratorExit:
            if got is not None and got.header is not None:
                self._recheck(wants[got.index], deadline.earlier(RECHECK_SECONDS))
            raise

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        deadline = Deadline.after(timeout)
        tried: set[str] = set()
        if sum(offer.size for offer in offers) <= SEND_UNASKED:
            outcomes = self._send_small(offers, deadline)
        else:
            outcomes = self._put_asked(offers, 0.0, deadline, tried)
        late = [i for i, outcome in enumerate(outcomes) if outcome.status is PutStatus.PENDING]
        while late and deadline.remaining() > GRACE:
            try:
                again = self._put_asked(
                    [offers[i] for i in late], deadline.remaining(), deadline, tried
                )
            except DeadlineExceeded:
                break  # they are still pending at the deadline
            for i, outcome in zip(late, again, strict=True):
                outcomes[i] = outcome
            late = [i for i in late if outcomes[i].status is PutStatus.PENDING]
        return outcomes

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        with mapped_errors():
            for boot in {lease.boot for lease in leases}:
                ids = [lease.id for lease in leases if lease.boot == boot]
                self._calls.stub.Release(pb.ReleaseRequest(boot=boot, leases=ids), timeout=timeout)

    def stats(self, timeout: float) -> StoreStats:
        with mapped_errors():
            return stats_of(self._calls.stub.GetStats(pb.GetStatsRequest(), timeout=timeout))

    def clear(self, timeout: float) -> int:
        with mapped_errors():
            return self._calls.stub.Clear(pb.ClearRequest(), timeout=timeout).removed

    def close(self) -> None:
        self._closed.set()
        self._calls.close()
        self._transports.close()

    def _arriving(
        self, wants: Sequence[Want], deadline: Deadline
    ) -> Generator[GetResult, None, None]:
        """Fetch the blocks, trying one transport after another."""
        progress = GetProgress()
        tried: set[str] = set()
        while True:
            transport = self._transports.choose(tried, deadline)
            tracing.current().set({TRANSPORT: transport.name})
            try:
                yield from transport.get(wants, progress, deadline)
                return
            except (Unavailable, Corrupt) as error:
                self._after(transport, error, tried)

    def _recheck(self, want: Want, deadline: Deadline) -> None:
        """A wrong block is removed, so that it can be put again. Failures are only logged."""
        name = want.name
        proof = b"" if want.key is None else want.key.proof(name)
        request = pb.RecheckRequest(name=name, proof=proof)
        try:
            with mapped_errors():
                self._calls.stub.Recheck(request, timeout=deadline.remaining(), metadata=trace())
        except KvrelayError as error:
            log.info("%s: block %s was not verified again: %s", self.url, name.hex(), error)

    def _ask(
        self, query: NameQuery, timeout: float, each: bool
    ) -> tuple[pb.LookupResponse, Lease | None]:
        request = pb.LookupRequest(
            names=query.names,
            tails=[pb.Tail(after=tail.after, name=tail.name) for tail in query.tails],
            lease_ms=round(query.ttl * 1000),
            each=each,
            first_block_hashes=query.first_block_hashes,
        )
        asked = time.monotonic()
        with mapped_errors():
            answer = self._calls.stub.Lookup(request, timeout=timeout, metadata=trace())
        self._transports.seen_boot(answer.boot)
        lease = Lease(answer.lease, answer.boot, asked + answer.lease_ms / 1000)
        return answer, lease if answer.lease else None

    def _after(self, transport: Transport, error: KvrelayError, tried: set[str]) -> None:
        """A transport failed: raise, or return to try the next one."""
        if self._closed.is_set():
            raise Unavailable("this store was closed") from error
        if transport.name == TRANSPORTS[-1]:
            raise error
        self._transports.failed(transport, error)
        tried.add(transport.name)

    def _put_asked(
        self, offers: Sequence[Offer], wait: float, deadline: Deadline, tried: set[str]
    ) -> list[Outcome]:
        """Reserve blocks, waiting up to ``wait`` seconds for other writers, and send them.

        When a transport fails, every block counts as pending: those that it carried exist when
        asked again, and the others are free again when the store has noticed.
        """
        granted: PutGrant | None = None
        if wait:
            # Half of the time at most, so that there is time left to send.
            answer = self._calls.reserve(reserve_request(offers, wait / 2), deadline)
            granted = PutGrant(answer, offers)
            if not granted.wanted:
                return granted.outcomes(iter(()))
        transport = self._transports.choose(tried, deadline)
        tracing.current().set({TRANSPORT: transport.name})
        try:
            if granted is None:
                return transport.put(offers, deadline)
            with abandoned_on_error(self._calls, granted, deadline):
                return transport.send(granted, deadline)
        except (Unavailable, Corrupt) as error:
            self._after(transport, error, tried)
            return [Outcome(PutStatus.PENDING)] * len(offers)

    def _send_small(self, offers: Sequence[Offer], deadline: Deadline) -> list[Outcome]:
        if not offers:
            return []
        head = pb.PutHead(claims=[claim_message(offer) for offer in offers])
        request = pb.PutSmallRequest(head=head, data=b"".join(buffers_of(offers)))
        with mapped_errors():
            answer = self._calls.stub.PutSmall(
                request, timeout=deadline.remaining(), metadata=trace()
            )
        return outcomes_of(answer, len(offers))
