"""The rows of Redis: our client beside a bare socket that speaks the protocol.

The bare socket knows how long every value is and receives it where it belongs, several megabytes
ahead and without a look at what comes; it sends what was packed before.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.store.redis_server import LocalRedis, find_server
from benchmarks.store.rig import (
    GB,
    GET_BLOCKS,
    PUT_BLOCKS,
    TIMEOUT,
    Run,
    StoreRig,
    all_stored,
    get_blocks,
)
from kvrelay.errors import Corrupt
from kvstore.base import Block, Offer
from kvstore.redis import RedisStore
from kvstore.redis.reads import WINDOW

RIVALS = {"redis get": "bare redis get", "redis put": "bare redis put"}


@contextmanager
def redis_rows(rig: StoreRig) -> Iterator[dict[str, Run]]:
    """What is measured by name, against a server of our own; nothing where there is none."""
    path = find_server()
    if path is None:
        yield {}
        return
    with LocalRedis(path) as server:
        rows = _Rows(rig, server)
        rig.others.append(server.pid)
        try:
            yield rows.table()
        finally:
            rig.others.remove(server.pid)
            rows.close()


class _Rows:
    """The store, the socket and the blocks that both read."""

    def __init__(self, rig: StoreRig, server: LocalRedis) -> None:
        self._rig = rig
        self._store = RedisStore(server.settings)
        self._fresh = RedisStore(replace(server.settings, prefix="fresh"))
        self._sock = socket.create_connection(("127.0.0.1", server.port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, rig.count, PUT_BLOCKS):
            numbers = range(start, min(start + PUT_BLOCKS, rig.count))
            all_stored(self._store, [rig.offer(n, rig.wanted[n]) for n in numbers])

    def table(self) -> dict[str, Run]:
        """In the order in which they are shown."""
        return {
            "bare redis get": self._bare_get,
            "redis get": self._get,
            "bare redis put": self._emptied(self._bare_put),
            "redis put": self._emptied(self._put),
        }

    def close(self) -> None:
        """Hang up."""
        self._sock.close()
        self._store.close()
        self._fresh.close()

    def _get(self, total: int) -> float:
        rig, began, done = self._rig, time.perf_counter(), 0
        while done < total // rig.size:
            first = done % rig.count
            numbers = range(first, min(first + GET_BLOCKS, rig.count))[: total // rig.size - done]
            get_blocks(rig, self._store, numbers)
            done += len(numbers)
        return done * rig.size / (time.perf_counter() - began) / GB

    def _bare_get(self, total: int) -> float:
        rig, count = self._rig, total // self._rig.size
        header = rig.block_bytes - rig.size
        head = memoryview(bytearray(len(b"$%d\r\n" % rig.block_bytes) + header))
        tail = memoryview(bytearray(2))
        asks = [_command(b"GET", self._key(n)) for n in range(rig.count)]
        ahead = max(1, WINDOW // rig.size)
        began, asked = time.perf_counter(), 0
        for done in range(count):
            if asked - done <= ahead // 2:
                more = range(asked, min(done + ahead, count))
                self._sock.sendall(b"".join(asks[n % rig.count] for n in more))
                asked = more.stop
            self._fill([head, rig.buffer(done % rig.count), tail])
        return count * rig.size / (time.perf_counter() - began) / GB

    def _put(self, total: int) -> float:
        offers = self._rig.new_offers(total // self._rig.size)
        began = time.perf_counter()
        for start in range(0, len(offers), PUT_BLOCKS):
            all_stored(self._fresh, offers[start : start + PUT_BLOCKS])
        return len(offers) * self._rig.size / (time.perf_counter() - began) / GB

    def _bare_put(self, total: int) -> float:
        sets = [self._packed(offer) for offer in self._rig.new_offers(total // self._rig.size)]
        ahead = max(1, WINDOW // self._rig.size)
        began, answered = time.perf_counter(), 0
        for number, (head, block) in enumerate(sets):
            if number - answered >= ahead:
                answered += self._oks(1)
            views: list[bytes | memoryview] = [head, block.header, block.payload, b"\r\n"]
            sent = self._sock.sendmsg(views)
            if sent < len(head) + block.size + 2:
                self._sock.sendall(b"".join(views)[sent:])
        while answered < len(sets):
            answered += self._oks(len(sets) - answered)
        return len(sets) * self._rig.size / (time.perf_counter() - began) / GB

    def _packed(self, offer: Offer) -> tuple[bytes, Block]:
        key, block = b"fresh:" + offer.name.hex().encode(), offer.read().seal()
        return b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, block.size), block

    def _oks(self, count: int) -> int:
        data = bytearray(5 * count)
        self._fill([memoryview(data)])
        if bytes(data) != b"+OK\r\n" * count:
            raise Corrupt("answer", f"{bytes(data[:40])!r}")
        return count

    def _emptied(self, run: Run) -> Run:
        def and_empty(total: int) -> float:
            rate = run(total)
            self._fresh.clear(TIMEOUT)
            return rate

        return and_empty

    def _fill(self, views: list[memoryview]) -> None:
        total = sum(map(len, views))
        if self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0] != total:
            raise Corrupt("answer", "the connection ended")

    def _key(self, number: int) -> bytes:
        return b"kvrelay:" + self._rig.wanted[number].name.hex().encode()


def _command(*words: bytes) -> bytes:
    parts = (b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
    return b"*%d\r\n" % len(words) + b"".join(parts)
