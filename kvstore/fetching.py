"""Blocks on their way from the store over a lane, in batches of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import Corrupt
from kvstore.base import Want
from kvstore.frames import Op, Request, Status
from kvstore.line import Line
from kvstore.way import split_of
from kvstore.wire import skip
from protos import kvstore_pb2 as pb

BATCH_BYTES = 4 << 20
"""Asked for in one request."""


@dataclass(slots=True)
class Batch:
    """Blocks that follow one another in the lease, from number ``first`` on."""

    first: int
    wants: list[int]
    size: int


def batches_of(wants: Sequence[Want], lengths: Sequence[int]) -> list[Batch]:
    """What is there, in pieces. A name asked for twice is held once by the lease."""
    batches: list[Batch] = []
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
            last = Batch(number, [], 0)
            batches.append(last)
        last.wants.append(index)
        last.size += length
    return batches


def ask(line: Line, found: pb.LocateResponse, batches: Sequence[Batch], number: int) -> None:
    batch, last = batches[number], number == len(batches) - 1
    line.ask(Request(Op.GET, found.lease, found.token, batch.first, len(batch.wants), last=last))


def receive(
    line: Line, wants: Sequence[Want], lengths: Sequence[int], batch: Batch
) -> list[bytes | None]:
    """The headers of a batch; ``None`` for all of them when the lease has ended."""
    answer = line.answer()
    if answer.status is Status.GONE:
        return [None] * len(batch.wants)
    if answer.length != batch.size:
        raise Corrupt("answer", f"{answer.length} bytes came and {batch.size} were located")
    headers: list[bytearray | None] = []
    views: list[memoryview] = []
    for index in batch.wants:
        split = split_of(lengths[index], wants[index])
        headers.append(None if split is None else bytearray(split))
        header = headers[-1]
        views += (
            skip(lengths[index]) if header is None else (memoryview(header), wants[index].buffer)
        )
    line.pipe.receive_into(views)
    return [None if header is None else bytes(header) for header in headers]
