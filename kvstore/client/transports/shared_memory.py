"""The transport through shared memory, for clients on the store's host: blocks in no message.

A reader asks for the places of its blocks under a lease, copies from the store's arena, which it
has mapped read-only, and checks after each copy that the lease had not ended. A writer fills a
window of its own, from which the store copies: only the store writes to the arena. If a driver has
registered arena and window, its accelerator copies directly.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Generator, Sequence

from kvrelay.errors import Corrupt, Unavailable
from kvrelay.rpc.deadline import Deadline
from kvrelay.v1 import store_pb2 as pb
from kvstore.base import GetResult, Offer, Outcome, Want
from kvstore.client.transports.base import GetProgress, borrowed, lease_ms, parse_answer
from kvstore.client.transports.connection import StoreConnection, dial_unix
from kvstore.client.transports.grants import PutGrant, reserve_request
from kvstore.client.transports.staging import Staging, batches, first_batch
from kvstore.device import DeviceTarget, MemoryRegistrar
from kvstore.wire.arena import open_arena
from kvstore.wire.copying import copy, copy_summed
from kvstore.wire.frames import Op, RequestFrame
from kvstore.wire.pool import ConnectionPool


class SharedMemoryTransport:
    """A ``Transport``. The constructor raises ``Unavailable`` if the store is not on this host."""

    name = "shm"
    title = "shared memory"

    def __init__(
        self,
        offered: pb.GetTransportsResponse,
        deadline: Deadline,
        registrar: MemoryRegistrar | None = None,
    ) -> None:
        if not offered.unix_socket or not offered.arena_bytes:
            raise Unavailable("the store shares no memory")
        self._boot = offered.boot
        self._registrar = registrar
        self._pool = ConnectionPool(
            lambda deadline: dial_unix(offered.unix_socket, deadline, offered.boot)
        )
        self._windows: weakref.WeakKeyDictionary[StoreConnection, mmap.mmap] = (
            weakref.WeakKeyDictionary()
        )
        with borrowed(self._pool, deadline) as connection:
            connection.send(RequestFrame(Op.ATTACH))
            fd, size = connection.receive_descriptor()
            try:
                self._mapped = open_arena(fd, size, offered.boot)
            finally:
                os.close(fd)
        self._arena = memoryview(self._mapped)
        if registrar is not None:
            registrar.register(self._mapped, writable=False)

    def get(
        self, wants: Sequence[Want], progress: GetProgress, deadline: Deadline
    ) -> Generator[GetResult, None, None]:
        left = wants[progress.done :]
        with borrowed(self._pool, deadline) as connection:
            asked = time.monotonic()
            located = self._locate(connection, left, deadline)
            until = asked + located.lease_ms / 1000
            try:
                if left and (device := left[0].device) is not None:
                    for got in self._fetch_batch(progress.done, left, located, until, device):
                        progress.done += 1
                        yield got
                    return
                for want, length, offset in zip(
                    left, located.lengths, located.offsets, strict=True
                ):
                    got = self._fetch(progress.done, want, length, offset)
                    if time.monotonic() >= until:  # its place may hold another block by now
                        got = GetResult(progress.done, None)
                    progress.done += 1
                    yield got
            finally:
                if located.lease:
                    connection.release(located.lease, located.proof)

    def put(self, offers: Sequence[Offer], deadline: Deadline) -> list[Outcome]:
        """The first batch is written while the rest is being reserved."""
        body = reserve_request(offers).SerializeToString()
        with borrowed(self._pool, deadline) as connection:
            staging = Staging(connection, self._window(connection))
            limit = first_batch(offers)
            first = len(next(batches(offers, limit, staging.half)))
            connection.send(RequestFrame(Op.RESERVE, first=first, body=len(body)), body)
            begun = _granted(connection, offers[:first])
            if first == len(offers):
                staging.send(begun, limit)
                return begun.outcomes(staging.finish())
            staging.send(begun, limit, last=False)
            rest = _granted(connection, offers[first:])
            staging.send(rest, 2 * limit)
            sent = staging.finish()
            return begun.outcomes(sent) + rest.outcomes(sent)

    def send(self, granted: PutGrant, deadline: Deadline) -> list[Outcome]:
        if granted.ticket.boot != self._boot:
            raise Unavailable("the store was restarted")
        with borrowed(self._pool, deadline) as connection:
            staging = Staging(connection, self._window(connection))
            staging.send(granted, first_batch(granted.wanted))
            return granted.outcomes(staging.finish())

    def close(self, cut: bool = True) -> None:
        self._pool.close(cut)
        if self._registrar is not None:
            self._registrar.unregister(self._mapped)

    def _locate(
        self, connection: StoreConnection, wants: Sequence[Want], deadline: Deadline
    ) -> pb.LocateResponse:
        names = [want.name for want in wants]
        body = pb.LocateRequest(names=names, lease_ms=lease_ms(deadline)).SerializeToString()
        connection.send(RequestFrame(Op.LOCATE, body=len(body)), body)
        located = parse_answer(pb.LocateResponse, connection.receive_body())
        if not len(located.lengths) == len(located.offsets) == len(wants):
            raise Corrupt("lengths", f"{len(located.lengths)} were answered for {len(wants)} names")
        return located

    def _fetch_batch(
        self,
        first: int,
        wants: Sequence[Want],
        located: pb.LocateResponse,
        until: float,
        device: DeviceTarget,
    ) -> list[GetResult]:
        """Let a device copy a batch; all are absent if the lease ended before the copies did."""
        got: list[GetResult] = []
        try:
            for want, length, offset in zip(wants, located.lengths, located.offsets, strict=True):
                got.append(self._fetch(first + len(got), want, length, offset))
        finally:
            device.settle()
        if time.monotonic() >= until:  # their places may hold other blocks by now
            return [GetResult(each.index, None) for each in got]
        return got

    def _fetch(self, index: int, want: Want, length: int, offset: int) -> GetResult:
        """Copy one block: the payload goes to its device or into its buffer."""
        if (split := want.header_length(length)) is None:
            return GetResult(index, b"" if length else None)
        if offset + length > len(self._arena):
            raise Corrupt("offsets", f"{offset} + {length} is beyond the arena")
        start = offset + split
        header = bytes(self._arena[offset:start])
        payload = self._arena[start : offset + length]
        if want.device is not None and want.device.take(header, payload):
            return GetResult(index, header, taken=True)
        if want.heads:
            return GetResult(index, header, copy_summed(want.buffer, payload, want.heads))
        copy(want.buffer, payload)
        return GetResult(index, header)

    def _window(self, connection: StoreConnection) -> memoryview:
        window = self._windows.get(connection)
        if window is None:
            connection.send(RequestFrame(Op.WINDOW))
            fd, size = connection.receive_descriptor()
            try:
                window = self._windows[connection] = mmap.mmap(fd, size)
            finally:
                os.close(fd)
            self._register_window(connection, window)
        return memoryview(window)

    def _register_window(self, connection: StoreConnection, window: mmap.mmap) -> None:
        if (registrar := self._registrar) is not None:
            registrar.register(window, writable=True)
            connection.at_close(lambda: registrar.unregister(window))


def _granted(connection: StoreConnection, offers: Sequence[Offer]) -> PutGrant:
    return PutGrant(parse_answer(pb.ReserveResponse, connection.receive_body()), offers)
