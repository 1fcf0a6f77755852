"""The frames of a socket connection: a binary header each way, then its body, then blocks' bytes.

The socket is TCP or Unix. A request may read or write what its lease or ticket covers; gRPC gives
leases and tickets out, with their proofs. Answers come in order. Little-endian::

    request   0 magic 4s | 4 version u8 | 5 op u8 | 6 flags u16 | 8 lease or ticket u64
             16 proof 16s | 32 first u32 | 36 count u32 | 40 length of the body u64
    answer    0 magic 4s | 4 version u8 | 5 status u8 | 6 zero u16 | 8 length of what follows u64
             16 boot 16s
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvrelay.block.name import NAME_BYTES
from kvrelay.errors import Corrupt, Rejected
from kvstore.limits import MAX_NAMES

MAGIC = b"KVRL"
VERSION = 2
PROOF_BYTES = 16
SIZE_BYTES = 8
MAX_BODY = 4 << 20
LAST = 1
"""Flag: the lease or ticket ends with this request."""

_REQUEST = struct.Struct("<4sBBHQ16sIIQ")
_ANSWER = struct.Struct("<4sBBHQ16s")
_ROW = struct.Struct(f"<{NAME_BYTES}sQQ")

REQUEST_BYTES = _REQUEST.size
ANSWER_BYTES = _ANSWER.size


class Op(IntEnum):
    """Operations. Those without lease or ticket are allowed on a Unix socket only."""

    ATTACH = 1  # answered with the arena's descriptor; body of the answer: its size, u64
    WINDOW = 2  # answered with the descriptor of a writable segment; its size, u64
    LOCATE = 3  # LocateRequest -> LocateResponse
    STAGE = 4  # rows, whose bytes are in the window -> PutResponse
    GET = 5  # bytes of the blocks ``first`` to ``first + count`` of the lease; LAST: and an answer
    PUT = 6  # rows, then their bytes -> PutResponse
    RELEASE = 7  # of the lease
    RESERVE = 8  # ReserveRequest -> ReserveResponse, of the claims before ``first`` and of the rest


class Status(IntEnum):
    """The result of a request."""

    OK = 0
    ENDED = 1  # lease or ticket has ended, or was never given
    REJECTED = 2  # the body says why; the connection is closed


_OPS = {op.value: op for op in Op}
_STATUSES = {status.value: status for status in Status}


@dataclass(frozen=True, slots=True)
class RequestFrame:
    """``body`` is its length in bytes; ``first`` and ``count`` number blocks."""

    op: Op
    serial: int = 0
    proof: bytes = bytes(PROOF_BYTES)
    first: int = 0
    count: int = 0
    body: int = 0
    last: bool = False

    def encode(self) -> bytes:
        return _REQUEST.pack(
            MAGIC,
            VERSION,
            self.op,
            LAST if self.last else 0,
            self.serial,
            self.proof,
            self.first,
            self.count,
            self.body,
        )


@dataclass(frozen=True, slots=True)
class AnswerFrame:
    """``length`` bytes follow it."""

    status: Status
    length: int
    boot: bytes

    def encode(self) -> bytes:
        return _ANSWER.pack(MAGIC, VERSION, self.status, 0, self.length, self.boot)


class BlockRow(NamedTuple):
    """One block of a put: its name and size, and for STAGE its offset in the window."""

    name: bytes
    size: int
    offset: int = 0

    def encode(self) -> bytes:
        return _ROW.pack(self.name, self.size, self.offset)


def parse_request(data: bytes) -> RequestFrame:
    """``Rejected`` names the field that is wrong."""
    magic, version, op, flags, serial, proof, first, count, body = _REQUEST.unpack(data)
    if (magic, version) != (MAGIC, VERSION):
        raise Rejected("magic", f"{magic!r} version {version} is not {MAGIC!r} version {VERSION}")
    if op not in _OPS:
        raise Rejected("op", f"{op} is none of {', '.join(map(str, _OPS))}")
    if count > MAX_NAMES:
        raise Rejected("count", f"{count} is more than {MAX_NAMES}")
    if body > MAX_BODY:
        raise Rejected("body", f"{body} bytes are more than {MAX_BODY}")
    return RequestFrame(_OPS[op], serial, proof, first, count, body, bool(flags & LAST))


def parse_frame(data: bytes) -> AnswerFrame:
    """``Corrupt`` names the field that is wrong."""
    magic, version, status, _, length, boot = _ANSWER.unpack(data)
    if (magic, version) != (MAGIC, VERSION):
        raise Corrupt("magic", f"{magic!r} version {version} is not {MAGIC!r} version {VERSION}")
    if status not in _STATUSES:
        raise Corrupt("status", f"{status} is not known")
    return AnswerFrame(_STATUSES[status], length, boot)


def parse_rows(body: bytes, count: int, max_block: int) -> list[BlockRow]:
    """``count`` rows; ``Rejected`` if their number differs or a size is out of bounds."""
    if len(body) != count * _ROW.size:
        raise Rejected("body", f"{len(body)} bytes are not {count} rows")
    rows = list(map(BlockRow._make, _ROW.iter_unpack(body)))
    for index, row in enumerate(rows):
        if not 0 < row.size <= max_block:
            raise Rejected(f"rows[{index}].size", f"{row.size} is not in 1 .. {max_block}")
    return rows
