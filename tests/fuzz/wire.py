"""Raw bytes: noise, broken HTTP/2, floods of cheap frames, requests of the socket transport."""

from __future__ import annotations

import random
import struct

from kvrelay.v1 import store_pb2
from kvstore.wire.frames import BlockRow, Op, RequestFrame
from tests.fuzz.calls import methods, store_seeds
from tests.fuzz.mutate import Mutator
from tests.secured import ALICE, SERVICE

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 1, 4
MANY = 200  # frames of a flood
PATHS = sorted(
    {method.path for role in ("router", "prefill", "decode", "store") for method in methods(role)}
)


def frame(
    kind: int, flags: int, stream: int, body: bytes = b"", length: int | None = None
) -> bytes:
    """``length`` may lie."""
    size = len(body) if length is None else length
    return (
        struct.pack(">I", size & 0xFFFFFF)[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + body
    )


def headers(path: str, token: str | None) -> bytes:
    """Of a gRPC call, in plain HPACK: literals without indexing."""
    named = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "fuzz"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    named += [] if token is None else [("authorization", f"Bearer {token}")]
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in named)


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def http2(chance: random.Random) -> bytes:
    """One connection's worth of bytes that begin as HTTP/2 and go wrong somewhere."""
    call = headers(chance.choice(PATHS), chance.choice((None, ALICE, SERVICE)))
    begun = PREFACE + frame(SETTINGS, 0, 0)
    opened = begun + frame(HEADERS, END_HEADERS, 1, call)
    scripts = (
        lambda: PREFACE[: chance.randrange(len(PREFACE))],
        lambda: begun + chance.randbytes(chance.randrange(1, 400)),
        lambda: begun + frame(SETTINGS, 0, 0) * MANY,
        lambda: begun + frame(PING, 0, 0, bytes(8)) * MANY,
        lambda: (
            begun
            + b"".join(
                frame(HEADERS, END_HEADERS, 2 * n + 1, call) + frame(RESET, 0, 2 * n + 1, bytes(4))
                for n in range(MANY)
            )
        ),
        lambda: begun + frame(DATA, 0, 1, b"", (1 << 24) - 1) + bytes(1000),
        lambda: begun + frame(HEADERS, 0, 1, call) + frame(CONTINUATION, 0, 1, bytes(8000)) * 20,
        lambda: begun + frame(HEADERS, END_HEADERS, 1, chance.randbytes(chance.randrange(300))),
        lambda: begun + frame(HEADERS, END_HEADERS, 1, call.replace(b"relay", b"\xff\xfe\x80ay")),
        lambda: opened + frame(WINDOW, 0, 1, bytes(4)),
        lambda: opened + frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff") * 3,
        lambda: opened + frame(DATA, END_STREAM, 0, b"x"),
        lambda: opened + frame(DATA, 0, 1, b"\0\xff\xff\xff\xff" + b"x" * 100),  # 4 GiB are to come
        lambda: opened + frame(DATA, END_STREAM, 1, b"\1\0\0\0\4xxxx"),  # compressed, how?
        lambda: opened + frame(DATA, END_STREAM, 1, b"\0\0\0\0\x09abc"),
        lambda: opened + frame(DATA, END_STREAM, 1, b"\0" * 5) * 2,
        lambda: opened + frame(PUSH, 4, 1, bytes(8)) + frame(PRIORITY, 0, 1, bytes(5)),
        lambda: opened + frame(GOAWAY, 0, 0, bytes(8)) + frame(PING, 0, 0, bytes(7)),
        lambda: begun + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, (1 << 32) - 1)),
        lambda: begun + frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1)) + frame(11, 0, 1, b"y"),
        lambda: begun + b"".join(frame(HEADERS, END_HEADERS, 2 * n + 1, call) for n in range(MANY)),
    )
    return chance.choice(scripts)()


def noise(chance: random.Random) -> bytes:
    """Bytes that begin no protocol of ours."""
    return chance.choice(
        (
            chance.randbytes(chance.choice((1, 48, 1000, 60_000))),
            b"GET /" + b"a" * chance.choice((1, 5000, 70_000)) + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nx",
            b"\x16\x03\x01" + chance.randbytes(300),  # TLS, or nearly
            bytes(chance.choice((1, 100, 50_000))),
        )
    )


def http1(chance: random.Random) -> bytes:
    """For the port of the metrics."""
    return chance.choice(
        (
            b"GET /metrics HTTP/1.0\r\n\r\n",
            b"GET /metrics?" + b"name[]=x&" * 500 + b" HTTP/1.1\r\n\r\n",
            b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
            b"OPTIONS * HTTP/1.1\r\n" + b"X: y\r\n" * 300 + b"\r\n",
            b"POST /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            noise(chance),
        )
    )


class SocketBytes:
    """Requests of the socket transport. ``grants`` are serials and tokens that the store gave."""

    def __init__(self, chance: random.Random, grants: list[tuple[int, bytes]]) -> None:
        self._chance = chance
        self._grants = grants
        self._mutator = Mutator(chance)

    def connection(self) -> bytes:
        """Some requests one after another, the last of them damaged more often than not."""
        raw = b"".join(self._request() for _ in range(self._chance.choice((1, 1, 2, 5))))
        return self._mutator.damaged(raw) if self._chance.random() < 0.5 else raw

    def _request(self) -> bytes:
        chance = self._chance
        op = chance.choice(list(Op))
        serial, token = chance.choice([*self._grants, (0, bytes(16)), (7, chance.randbytes(16))])
        body, rest, count = b"", b"", chance.choice((0, 1, 2, 65_536, 1 << 31))
        if op in (Op.LOCATE, Op.RESERVE):
            body = self._mutator.of(store_seeds("Locate" if op is Op.LOCATE else "Reserve")[0])
        elif op in (Op.PUT, Op.STAGE):
            sizes = [chance.choice((0, 1, 4096, 1 << 40)) for _ in range(min(count, 2))]
            offsets = (0, 4096, 1 << 63)
            rows = [BlockRow(chance.randbytes(32), size, chance.choice(offsets)) for size in sizes]
            body, rest = b"".join(row.encode() for row in rows), bytes(sum(s % 8192 for s in sizes))
        request = RequestFrame(op, serial, token, chance.choice((0, 1, 1 << 31)), count, len(body))
        return request.encode() + body + rest


def claimed(response: store_pb2.ReserveResponse) -> tuple[int, bytes]:
    """Serial and proof of a grant."""
    return response.ticket, response.proof
