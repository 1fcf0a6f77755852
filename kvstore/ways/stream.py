"""The way of gRPC streams: slower than the others, and it works wherever gRPC does."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from common.errors import Corrupt
from kvstore.base import Got, Offer, Outcome, Want
from kvstore.messages import claim_message, outcomes_of
from kvstore.ways.calls import Calls, mapped
from kvstore.ways.granted import Granted, asking
from kvstore.ways.way import Progress, block_of, parsed, split_of
from kvstore.wire.buffers import HEAD, Pour, cut, parse, skip
from protos import kvstore_pb2 as pb
from rpc.deadline import Deadline


class StreamWay:
    """A ``Way``."""

    name = "grpc"
    title = "gRPC streams"

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def get(
        self, wants: Sequence[Want], progress: Progress, deadline: Deadline
    ) -> Generator[Got, None, None]:
        """As the protocol says."""
        base, left = progress.done, wants[progress.done :]
        request = pb.GetRequest(names=[want.name for want in left])
        with mapped():
            call = self._calls.get(request, timeout=deadline.remaining())
            try:
                for got in _received(left, call):
                    progress.done = base + got.index + 1
                    yield Got(base + got.index, got.header, got.summed)
            finally:
                call.cancel()

    def put(self, offers: Sequence[Offer], deadline: Deadline) -> list[Outcome]:
        """As the protocol says."""
        return self.send(Granted(self._calls.claim(asking(offers), deadline), offers), deadline)

    def send(self, granted: Granted, deadline: Deadline) -> list[Outcome]:
        """As the protocol says."""
        wanted, sent = granted.wanted, pb.PutResponse()
        if wanted:
            head = pb.PutHead(ticket=granted.ticket.serial, claims=map(claim_message, wanted))
            with mapped():
                sent = self._calls.put(_messages(head, wanted), timeout=deadline.remaining())
        return granted.outcomes(iter(outcomes_of(sent, len(wanted))))

    def close(self, cut: bool = True) -> None:
        """As the protocol says; the channel is its owner's."""


def _messages(head: pb.PutHead, offers: Sequence[Offer]) -> Iterator[bytes]:
    """gRPC asks for these in a thread of its own, and sends none once the call has ended.

    So what a caller changes in its buffers after ``put`` has returned never leaves this process.
    """
    yield pb.PutRequest(head=head).SerializeToString()
    yield from cut(buffers_of(offers))


def buffers_of(offers: Sequence[Offer]) -> Iterator[memoryview]:
    """The bytes of the blocks, one after another, each read when its turn comes."""
    for offer in offers:
        block = block_of(offer).seal()
        yield memoryview(block.header)
        yield block.payload


def _received(wants: Sequence[Want], messages: Iterator[bytes]) -> Iterator[Got]:
    """Pours the stream into the buffers of ``wants``; each ``Got`` as soon as it is whole."""
    part, body = parse(next(messages, b""))
    if part != HEAD:
        raise Corrupt("head", "must be the first message of an answer to Get")
    lengths = parsed(pb.GetHead, bytes(body)).lengths
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
        if (split := split_of(length, want)) is None:
            yield from skip(length)
            done.append(Got(index, None))
            continue
        header = bytearray(split)
        yield memoryview(header)
        yield want.buffer
        done.append(Got(index, bytes(header)))
