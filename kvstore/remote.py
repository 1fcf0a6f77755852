"""``kvrelay://HOST:PORT``: the store as a service, reached over gRPC.

Payloads are received straight into the callers' buffers; blocks that together are small are sent
without asking first, large ones only if the store wants them.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import grpc
import grpc.experimental

from common.errors import Corrupt, Unavailable
from kvblock.header import MAX_COUNT, header_bytes
from kvstore.base import NOT_SENT, Found, Got, Kept, Lease, Offer, Outcome, Want
from kvstore.messages import VERDICTS, claim_message, outcome_of, stats_of
from kvstore.records import Claim, Tail, Verdict
from kvstore.stats import Stats
from kvstore.wire import HEAD, Pour, cut, parse, skip
from protos import kvstore_pb2 as pb
from rpc.channel import ChannelOptions, open_sync_channel
from rpc.deadline import Deadline
from rpc.status import from_rpc_error

SEND_UNASKED = 256 << 10
"""Up to so many bytes in all a round trip costs more than sending in vain."""

GRACE = 0.05
"""With less time left than this, another writer is not waited for any more."""

_VERDICT_OF = {wire: verdict for verdict, wire in VERDICTS.items()}
_READ_IN_PLACE = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)
"""Whoever reads a stream waits for it himself: a third less time for a small block."""

_PATH = "/kvrelay.v1.KVStore/"


class _Options(ChannelOptions):
    def arguments(self) -> list[tuple[str, int]]:
        return [*ChannelOptions.arguments(self), _READ_IN_PLACE]


@contextmanager
def _mapped() -> Iterator[None]:
    """The boundary where errors of gRPC become ours."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except ValueError as error:
        if "closed channel" not in str(error):
            raise
        raise Unavailable("this store was closed") from error


class RemoteStore:
    """A ``Store``. Connects when first used and again whenever it must."""

    def __init__(self, address: str) -> None:
        self.url = f"kvrelay://{address}"
        self._channel = open_sync_channel(address, _Options())
        unary = self._channel.unary_unary
        self._lookup = unary(
            _PATH + "Lookup", pb.LookupRequest.SerializeToString, pb.LookupResponse.FromString
        )
        self._reserve = unary(
            _PATH + "Reserve", pb.ReserveRequest.SerializeToString, pb.ReserveResponse.FromString
        )
        self._release = unary(
            _PATH + "Release", pb.ReleaseRequest.SerializeToString, pb.ReleaseResponse.FromString
        )
        self._stats = unary(
            _PATH + "Stats", pb.StatsRequest.SerializeToString, pb.StatsResponse.FromString
        )
        self._clear = unary(
            _PATH + "Clear", pb.ClearRequest.SerializeToString, pb.ClearResponse.FromString
        )
        self._put_small = unary(
            _PATH + "PutSmall", pb.PutRequest.SerializeToString, pb.PutResponse.FromString
        )
        self._get: grpc.UnaryStreamMultiCallable[pb.GetRequest, bytes] = self._channel.unary_stream(
            _PATH + "Get", pb.GetRequest.SerializeToString
        )
        self._put: grpc.StreamUnaryMultiCallable[bytes, pb.PutResponse] = (
            self._channel.stream_unary(_PATH + "Put", None, pb.PutResponse.FromString)
        )

    def lookup(
        self, names: Sequence[bytes], tails: Sequence[Tail], ttl: float, timeout: float
    ) -> Found:
        """As the protocol says."""
        request = pb.LookupRequest(
            names=names,
            tails=[pb.Tail(after=tail.after, name=tail.name) for tail in tails],
            lease_ms=round(ttl * 1000),
        )
        asked = time.monotonic()
        with _mapped():
            answer = self._lookup(request, timeout=timeout)
        lease = Lease(answer.lease, answer.boot, asked + answer.lease_ms / 1000)
        return Found(
            lead=answer.lead,
            tail=answer.tail if answer.HasField("tail") else None,
            sizes=tuple(answer.places.lengths),
            lease=lease if answer.lease else None,
        )

    def get(self, wants: Sequence[Want], timeout: float) -> Generator[Got, None, None]:
        """As the protocol says."""
        with _mapped():
            call = self._get(pb.GetRequest(names=[want.name for want in wants]), timeout=timeout)
            try:
                yield from _received(wants, call)
            finally:
                call.cancel()

    def put(self, offers: Sequence[Offer], timeout: float) -> list[Outcome]:
        """As the protocol says."""
        deadline = Deadline.after(timeout)
        with _mapped():
            if sum(offer.size for offer in offers) <= SEND_UNASKED:
                outcomes = self._send_small(offers, deadline)
            else:
                outcomes = self._put_asked(offers, 0.0, deadline)
            late = [i for i, outcome in enumerate(outcomes) if outcome.kept is Kept.PENDING]
            while late and deadline.remaining() > GRACE:
                again = self._put_asked([offers[i] for i in late], deadline.remaining(), deadline)
                for i, outcome in zip(late, again, strict=True):
                    outcomes[i] = outcome
                late = [i for i in late if outcomes[i].kept is Kept.PENDING]
        return outcomes

    def release(self, leases: Sequence[Lease], timeout: float) -> None:
        """As the protocol says."""
        with _mapped():
            for boot in {lease.boot for lease in leases}:
                ids = [lease.id for lease in leases if lease.boot == boot]
                self._release(pb.ReleaseRequest(boot=boot, leases=ids), timeout=timeout)

    def stats(self, timeout: float) -> Stats:
        """As the protocol says."""
        with _mapped():
            return stats_of(self._stats(pb.StatsRequest(), timeout=timeout))

    def clear(self, timeout: float) -> int:
        """As the protocol says."""
        with _mapped():
            return self._clear(pb.ClearRequest(), timeout=timeout).removed

    def close(self) -> None:
        """As the protocol says."""
        self._channel.close()

    def _put_asked(self, offers: Sequence[Offer], wait: float, deadline: Deadline) -> list[Outcome]:
        """Ask which are wanted, waiting up to ``wait`` for other writers, and send those."""
        # Half the wait at most: when it is over, there must be time to send.
        request = pb.ReserveRequest(
            claims=[claim_message(_claim(offer)) for offer in offers],
            wait_ms=round(wait * 500),
        )
        grant = self._reserve(request, timeout=deadline.remaining())
        verdicts = [_VERDICT_OF[verdict] for verdict in grant.verdicts]
        wanted = [o for o, v in zip(offers, verdicts, strict=True) if v is Verdict.RESERVED]
        sent = iter(self._send(grant.ticket, wanted, deadline) if wanted else [])
        return [
            next(sent) if verdict is Verdict.RESERVED else Outcome(NOT_SENT[verdict])
            for verdict in verdicts
        ]

    def _send_small(self, offers: Sequence[Offer], deadline: Deadline) -> list[Outcome]:
        if not offers:
            return []
        head = pb.PutHead(claims=[claim_message(_claim(offer)) for offer in offers])
        request = pb.PutRequest(head=head, data=b"".join(_buffers(offers)))
        answer = self._put_small(request, timeout=deadline.remaining())
        return [outcome_of(outcome) for outcome in answer.outcomes]

    def _send(self, ticket: int, offers: Sequence[Offer], deadline: Deadline) -> list[Outcome]:
        head = pb.PutHead(ticket=ticket, claims=[claim_message(_claim(offer)) for offer in offers])
        answer = self._put(_messages(head, offers), timeout=deadline.remaining())
        return [outcome_of(outcome) for outcome in answer.outcomes]


def _claim(offer: Offer) -> Claim:
    return Claim(offer.name, offer.size, offer.partial)


def _messages(head: pb.PutHead, offers: Sequence[Offer]) -> Iterator[bytes]:
    """gRPC asks for these in a thread of its own, and sends none once the call has ended.

    So what a caller changes in its buffers after ``put`` has returned never leaves this process.
    """
    yield pb.PutRequest(head=head).SerializeToString()
    yield from cut(_buffers(offers))


def _buffers(offers: Sequence[Offer]) -> Iterator[memoryview]:
    for offer in offers:
        block = offer.read()
        yield memoryview(block.header)
        yield block.payload


def _received(wants: Sequence[Want], messages: Iterator[bytes]) -> Iterator[Got]:
    """Pours the stream into the buffers of ``wants``; each ``Got`` as soon as it is whole."""
    part, body = parse(next(messages, b""))
    if part != HEAD:
        raise Corrupt("head", "must be the first message of an answer to Get")
    lengths = pb.GetHead.FromString(bytes(body)).lengths
    if len(lengths) != len(wants):
        raise Corrupt("lengths", f"{len(lengths)} came for {len(wants)} names")
    done: list[Got] = []
    pour = Pour(_targets(wants, lengths, done))
    yield from _drained(done)
    for message in messages:
        pour.feed(parse(message)[1])
        yield from _drained(done)
    if not pour.full:
        raise Corrupt("data", "ended before the last block was whole")


def _drained(done: list[Got]) -> Iterator[Got]:
    yield from done
    done.clear()


def _targets(
    wants: Sequence[Want], lengths: Sequence[int], done: list[Got]
) -> Iterator[memoryview]:
    for index, (want, length) in enumerate(zip(wants, lengths, strict=True)):
        split = length - len(want.buffer)
        if not header_bytes(0) <= split <= header_bytes(MAX_COUNT):
            yield from skip(length)
            done.append(Got(index, None))
            continue
        header = bytearray(split)
        yield memoryview(header)
        yield want.buffer
        done.append(Got(index, bytes(header)))
