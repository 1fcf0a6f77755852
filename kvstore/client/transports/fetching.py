"""Blocks on their way from the store over a lane, in batches of neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvrelay.errors import Corrupt
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import Want
from kvstore.client.transports.connection import StoreConnection
from kvstore.wire.buffers import skip
from kvstore.wire.copying import HASH_CHUNK, receive_summed
from kvstore.wire.frames import Op, RequestFrame, Status

BATCH_BYTES = 4 << 20
"""Asked for in one request."""

LARGE = 128 << 10
"""From here on a block is received by itself, and summed while it lies in the CPU's cache."""


@dataclass(slots=True)
class FetchBatch:
    """Blocks that follow one another in the lease, from number ``first`` on."""

    first: int
    wants: list[int]
    size: int


def batches_of(wants: Sequence[Want], lengths: Sequence[int]) -> list[FetchBatch]:
    """What is there, in pieces. A name asked for twice is held once by the lease."""
    batches: list[FetchBatch] = []
    numbers: dict[bytes, int] = {}
    for index, (want, length) in enumerate(zip(wants, lengths, strict=True)):
        if not length:
            continue
        number = numbers.setdefault(want.name, len(numbers))
        last = batches[-1] if batches else None
        if (
            last is None
            or number != last.first + len(last.wants)
            or last.size + length > BATCH_BYTES
        ):
            last = FetchBatch(number, [], 0)
            batches.append(last)
        last.wants.append(index)
        last.size += length
    return batches


def request_batch(
    line: StoreConnection, found: pb.LocateResponse, batches: Sequence[FetchBatch], number: int
) -> None:
    batch, last = batches[number], number == len(batches) - 1
    line.ask(
        RequestFrame(Op.GET, found.lease, found.proof, batch.first, len(batch.wants), last=last)
    )


def receive_batch(
    line: StoreConnection, wants: Sequence[Want], lengths: Sequence[int], batch: FetchBatch
) -> Iterator[tuple[int, bytes | None, int | None]]:
    """Number, header and checksum (if computed) of each block of a batch, in order.

    No header for any of them when the lease has ended.
    """
    answer = line.answer()
    if answer.status is Status.GONE:
        yield from ((index, None, None) for index in batch.wants)
        return
    if answer.length != batch.size:
        raise Corrupt("answer", f"{answer.length} bytes came and {batch.size} were located")
    largest = max(lengths[index] for index in batch.wants)
    if largest < LARGE:
        step = HASH_CHUNK // largest
        for start in range(0, len(batch.wants), step):
            yield from _small(line, wants, lengths, batch.wants[start : start + step])
        return
    for index in batch.wants:
        header, summed = _large(line, wants[index], lengths[index])
        yield index, header, summed


def _small(
    line: StoreConnection, wants: Sequence[Want], lengths: Sequence[int], indices: Sequence[int]
) -> Iterator[tuple[int, bytes | None, int | None]]:
    """As many as are then summed while they lie in the CPU's cache."""
    headers: list[bytearray | None] = []
    views: list[memoryview] = []
    for index in indices:
        split = wants[index].header_length(lengths[index])
        headers.append(None if split is None else bytearray(split))
        header = headers[-1]
        views += (
            skip(lengths[index]) if header is None else (memoryview(header), wants[index].buffer)
        )
    line.sock.receive_into(views)
    for index, header in zip(indices, headers, strict=True):
        yield index, None if header is None else bytes(header), None


def _large(line: StoreConnection, want: Want, length: int) -> tuple[bytes | None, int | None]:
    """One block, summed piece by piece while the next one is on its way."""
    if (split := want.header_length(length)) is None:
        for scratch in skip(length):
            line.sock.receive_into([scratch])
        return None, None
    header = bytearray(split)
    summed = receive_summed(line.sock.receive_into, memoryview(header), want.buffer)
    return bytes(header), summed
