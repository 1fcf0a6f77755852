"""One connection of the socket or shared-memory transport: the server's side.

Requests are answered in order. A request is checked before anything is allocated or written. Any
error ends the connection, and with it the tickets it wrote under.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvrelay.errors import Rejected
from kvrelay.v1 import store_pb2 as pb
from kvstore.claims import Claim
from kvstore.limits import MAX_NAMES
from kvstore.server.arena import GROW, SEAL, SHRINK, memfd, seal
from kvstore.server.block_store import BlockStore
from kvstore.server.puts import ReceiveRow, place_rows
from kvstore.server.responses import DISK_LOAD_SECONDS, locate_response, reserve_response
from kvstore.server.slot import WriteSlot
from kvstore.server.tenants import OPEN_SCOPE
from kvstore.wire.buffers import skip
from kvstore.wire.frames import (
    REQUEST_BYTES,
    SIZE_BYTES,
    AnswerFrame,
    BlockRow,
    Op,
    RequestFrame,
    Status,
    parse_request,
    parse_rows,
)
from kvstore.wire.messages import checked_names, claims_of, put_message
from kvstore.wire.sockets import DeadlineSocket

WINDOW_BYTES = 16 << 20
STRANGER_SECONDS = 30.0
"""For the first request of a remote peer, which must show a proof."""

LOCAL_ONLY = (Op.ATTACH, Op.WINDOW, Op.LOCATE, Op.RESERVE, Op.STAGE)

M = TypeVar("M", bound=Message)


class Session:
    """``run`` serves until the peer leaves. ``local``: a peer on this host of our user or root."""

    def __init__(self, sock: DeadlineSocket, store: BlockStore, local: bool) -> None:
        self._sock = sock
        self._store = store
        self._local = local
        self._window: mmap.mmap | None = None
        self._trusted = local
        self._tickets: dict[int, bytes] = {}  # to the prefix of their owner

    def run(self) -> None:
        """Serve until the peer leaves; ``KvrelayError`` if it breaks the protocol or is cut off."""
        try:
            while self._next():
                pass
        except Rejected as error:
            self._answer(Status.REJECTED, str(error).encode())
            raise
        finally:
            for ticket in self._tickets:
                self._store.abandon(ticket)

    def _next(self) -> bool:
        # A trusted connection may be idle between requests.
        life = self._store.limits.ticket_life
        self._sock.limit(life if self._trusted else STRANGER_SECONDS)
        if not self._sock.wait_readable(idle=self._trusted):
            return False
        self._sock.limit(life)
        request = parse_request(self._sock.receive(REQUEST_BYTES))
        if not self._local:
            self._check_stranger(request)
        body = self._sock.receive(request.body)
        _TABLE[request.op](self, request, body)
        return True

    def _check_stranger(self, request: RequestFrame) -> None:
        """Nothing else is read from a remote peer before it shows a proof given by this start."""
        if request.op in LOCAL_ONLY:
            raise Rejected("op", f"{request.op.name} is for peers on this host")
        if not self._store.check_proof(request.serial, request.proof):
            raise Rejected("proof", "was not issued by this start of the store")
        self._trusted = True

    def _answer(self, status: Status, body: bytes = b"") -> None:
        self._sock.send([AnswerFrame(status, len(body), self._store.boot).encode(), body])

    def _attach(self, request: RequestFrame, body: bytes) -> None:
        arena = self._store.arena
        if arena.fd is None:
            raise Rejected("op", "this store's memory cannot be shared")
        self._send_descriptor(arena.fd, arena.size)

    def _make_window(self, request: RequestFrame, body: bytes) -> None:
        """Create the connection's window: both sides write to it and neither can shrink it."""
        fd = memfd("kvrelay-window", WINDOW_BYTES)
        if fd is None or self._window is not None:
            raise Rejected("op", "there is one window for a connection, on Linux")
        try:
            if not seal(fd, SEAL | SHRINK | GROW):
                raise Rejected("op", "this system cannot seal memory")
            self._window = mmap.mmap(fd, WINDOW_BYTES)
            self._send_descriptor(fd, WINDOW_BYTES)
        finally:
            os.close(fd)

    def _send_descriptor(self, fd: int, size: int) -> None:
        answer = AnswerFrame(Status.OK, SIZE_BYTES, self._store.boot).encode()
        self._sock.send_descriptor(answer + size.to_bytes(SIZE_BYTES, "little"), fd)

    def _locate(self, request: RequestFrame, body: bytes) -> None:
        message = _parsed(pb.LocateRequest, body)
        if (disk_index := self._store.disk_index) is not None:
            names = checked_names("names", message.names, MAX_NAMES)
            if disk_index.load(names):
                disk_index.wait_for(names, min(DISK_LOAD_SECONDS, message.lease_ms / 2000))
        self._answer(Status.OK, locate_response(self._store, message).SerializeToString())

    def _reserve(self, request: RequestFrame, body: bytes) -> None:
        """The first of many claims are answered at once, so that their writer can start."""
        store, message = self._store, _parsed(pb.ReserveRequest, body)
        claims = claims_of(message.claims, len(message.claims), store.limits.max_block)
        self._tickets = {
            open_ticket: prefix
            for open_ticket, prefix in self._tickets.items()
            if store.owner(open_ticket) is not None
        }
        ticket: int | None = None
        for part in _parts(claims, request.first):
            grant = store.reserve(part, ticket)
            if (ticket := grant.ticket) is not None:
                self._tickets[ticket] = OPEN_SCOPE.prefix
            self._answer(Status.OK, reserve_response(store, grant).SerializeToString())

    def _release(self, request: RequestFrame, body: bytes) -> None:
        if self._store.check_proof(request.serial, request.proof):
            self._store.release([request.serial])
        self._answer(Status.OK)

    def _get(self, request: RequestFrame, body: bytes) -> None:
        known = self._store.check_proof(request.serial, request.proof)
        first, count = request.first, request.count
        lending = self._store.lend(request.serial, first, count) if known else nullcontext()
        with lending as blocks:
            if blocks is None:
                self._answer(Status.ENDED)
            elif len(blocks) != count:
                raise Rejected("count", f"the lease holds {first + len(blocks)} blocks")
            else:
                answer = AnswerFrame(Status.OK, sum(map(len, blocks)), self._store.boot)
                self._sock.send([answer.encode(), *blocks])
        if request.last:
            if known:
                self._store.release([request.serial])
            self._answer(Status.OK)  # the client then knows that the lease has ended

    def _put(self, request: RequestFrame, body: bytes) -> None:
        def receive(slot: WriteSlot | None, row: BlockRow) -> None:
            self._sock.limit(self._store.limits.ticket_life)
            if slot is not None:
                self._sock.receive_into([slot.buffer])
                slot.check()
                return
            for scratch in skip(row.size):
                self._sock.receive_into([scratch])

        self._place(request, body, receive)

    def _stage(self, request: RequestFrame, body: bytes) -> None:
        if self._window is None:
            raise Rejected("op", "there is no window yet")
        window = memoryview(self._window)

        def take(slot: WriteSlot | None, row: BlockRow) -> None:
            end = row.offset + row.size
            if end > len(window):
                raise Rejected("rows.offset", f"{row.offset} + {row.size} is beyond the window")
            if slot is not None:
                slot.copy_from(window[row.offset : end])

        self._place(request, body, take)

    def _place(self, request: RequestFrame, body: bytes, receive: ReceiveRow) -> None:
        rows = parse_rows(body, request.count, self._store.limits.max_block)
        prefix, ticket = self._owner_of(request), request.serial
        outcomes = place_rows(self._store, ticket, prefix, rows, receive)
        if request.last and self._tickets.pop(ticket, None) is not None:
            self._store.abandon(ticket)
        answer = put_message(pb.PutResponse, self._store.boot, outcomes)
        self._answer(Status.OK, answer.SerializeToString())

    def _owner_of(self, request: RequestFrame) -> bytes | None:
        """The prefix of a ticket's owner; ``None`` if this connection has not proved the ticket."""
        ticket = request.serial
        if ticket not in self._tickets and self._store.check_proof(ticket, request.proof):
            self._tickets[ticket] = self._store.owner(ticket) or b""
        return self._tickets.get(ticket)


# Outside of the session: a reference cycle would keep its window until the next collection.
_TABLE: dict[Op, Callable[[Session, RequestFrame, bytes], None]] = {
    Op.ATTACH: Session._attach,
    Op.WINDOW: Session._make_window,
    Op.LOCATE: Session._locate,
    Op.STAGE: Session._stage,
    Op.GET: Session._get,
    Op.PUT: Session._put,
    Op.RELEASE: Session._release,
    Op.RESERVE: Session._reserve,
}


def _parts(claims: Sequence[Claim], first: int) -> list[Sequence[Claim]]:
    """The claims before ``first`` and the rest, if both exist."""
    return [claims[:first], claims[first:]] if 0 < first < len(claims) else [claims]


def _parsed(kind: type[M], body: bytes) -> M:
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise Rejected("body", f"is no {kind.__name__}: {error}") from error
