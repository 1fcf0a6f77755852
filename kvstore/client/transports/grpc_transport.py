"""The transport over gRPC streams: slower than the others, and it works wherever gRPC does."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from kvrelay.errors import Corrupt
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import GetResult, Offer, Outcome, Want
from kvstore.client.calls import StoreCalls, mapped_errors, trace
from kvstore.client.transports.base import GetProgress, parse_answer, read_offer
from kvstore.client.transports.grants import PutGrant, reserve_request
from kvstore.wire.buffers import HEAD, ScatterBuffers, data_messages, parse, skip
from kvstore.wire.messages import claim_message, outcomes_of


class GrpcTransport:
    """A ``Transport``."""

    name = "grpc"
    title = "gRPC streams"

    def __init__(self, calls: StoreCalls) -> None:
        self._calls = calls

    def get(
        self, wants: Sequence[Want], progress: GetProgress, deadline: Deadline
    ) -> Generator[GetResult, None, None]:
        base = progress.done
        left = wants[base:]
        request = pb.GetRequest(names=[want.name for want in left])
        with mapped_errors():
            call = self._calls.get(request, timeout=deadline.remaining(), metadata=trace())
            try:
                for got in _received(left, call):
                    progress.done = base + got.index + 1
                    yield GetResult(base + got.index, got.header, got.summed)
            finally:
                call.cancel()

    def put(self, offers: Sequence[Offer], deadline: Deadline) -> list[Outcome]:
        answer = self._calls.reserve(reserve_request(offers), deadline)
        return self.send(PutGrant(answer, offers), deadline)

    def send(self, granted: PutGrant, deadline: Deadline) -> list[Outcome]:
        wanted = granted.wanted
        sent = pb.PutResponse()
        if wanted:
            head = pb.PutHead(ticket=granted.ticket.serial, claims=map(claim_message, wanted))
            with mapped_errors():
                messages = _messages(head, wanted)
                sent = self._calls.put(messages, timeout=deadline.remaining(), metadata=trace())
        return granted.outcomes(iter(outcomes_of(sent, len(wanted))))

    def close(self, cut: bool = True) -> None:
        """Nothing: the channel belongs to the ``RemoteStore``."""


def _messages(head: pb.PutHead, offers: Sequence[Offer]) -> Iterator[bytes]:
    """gRPC iterates over these in a thread of its own, and sends none after the call has ended.

    So changes of the caller's buffers after ``put`` has returned never leave this process.
    """
    yield pb.PutRequest(head=head).SerializeToString()
    yield from data_messages(buffers_of(offers))


def buffers_of(offers: Sequence[Offer]) -> Iterator[memoryview]:
    """Header and payload of each block, which is read when its turn comes."""
    for offer in offers:
        block = read_offer(offer).seal()
        yield memoryview(block.header)
        yield block.payload


def _received(wants: Sequence[Want], messages: Iterator[bytes]) -> Iterator[GetResult]:
    """Copy the stream into the buffers of ``wants``; yields each block as soon as it is whole."""
    part, body = parse(next(messages, b""))
    if part != HEAD:
        raise Corrupt("head", "must be the first message of an answer to Get")
    lengths = parse_answer(pb.GetHead, bytes(body)).lengths
    if len(lengths) != len(wants):
        raise Corrupt("lengths", f"{len(lengths)} were answered for {len(wants)} names")
    done: list[GetResult] = []
    scatter = ScatterBuffers(_targets(wants, lengths, done))
    yield from _drained(done)
    for message in messages:
        scatter.feed(parse(message)[1])
        yield from _drained(done)
    if not scatter.full:
        raise Corrupt("data", "ended before the last block was whole")


def _drained(done: list[GetResult]) -> Iterator[GetResult]:
    yield from done
    done.clear()


def _targets(
    wants: Sequence[Want], lengths: Sequence[int], done: list[GetResult]
) -> Iterator[memoryview]:
    for index, (want, length) in enumerate(zip(wants, lengths, strict=True)):
        if (split := want.header_length(length)) is None:
            yield from skip(length)
            done.append(GetResult(index, b"" if length else None))
            continue
        header = bytearray(split)
        yield memoryview(header)
        yield want.buffer
        done.append(GetResult(index, bytes(header)))
