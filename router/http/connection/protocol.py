"""Bounds each connection of the HTTP door: heads, requests that wait, and what is left unread.

uvicorn parses and writes; it bounds none of these, and it refuses new connections once there are
too many. Here an idle connection makes room, and one over TLS counts before its handshake has
ended.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.http.connection.heads import closing_response, head_refused, with_path, without_upgrade
from router.http.connection.table import ConnectionTable
from router.http.connection.wire import HeldFlow, Wire, WriteWatch
from router.http.errors import HttpRefusal

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, HTTPScope
    from uvicorn.config import Config
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

EXTENSION = "kvrelay.connection"
"""Where a request's scope has its connection, among the extensions."""

PIECE_BYTES = 1 << 10
"""Parsed at once. The parser does not stop behind a request, so that many bytes of requests may
wait for the one before them; a head is refused before it is two such pieces too long."""


class Reading(enum.Enum):
    """What becomes of the bytes that arrive."""

    REQUESTS = enum.auto()
    NOTHING = enum.auto()  # dropped: the connection ends with the requests that it has
    UNTIL_CLOSED = enum.auto()  # dropped: its last response is written, and the client may close


class BoundedProtocol(HttpToolsProtocol):
    """One connection. ``table`` is set on a subclass for each server."""

    table: ConnectionTable
    shakes_hands = False

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.host = ""
        self.end_handshake: Callable[[], None] | None = None
        self.below: asyncio.Transport | None = None  # what carries TLS
        self._wire: Wire | None = None  # None: it is not there yet, or lost
        self._reading = Reading.REQUESTS
        self._waiting = b""  # behind requests that wait: not parsed yet
        self._in_head = True
        self._in_body = False
        self._gathered = 0  # bytes since the parser has told of something
        self._unread = 0  # bytes that were dropped since the last request
        self._answered = 0  # requests
        self._server_ends = False
        self._unframed = False  # the response ends with the connection
        self._refused: HttpRefusal | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._discard_timer: asyncio.TimerHandle | None = None
        self._requests: deque[RequestResponseCycle] = deque()  # not answered in full, oldest first
        stuck_seconds = self.table.limits.stuck_seconds
        self.watch = WriteWatch(self.loop, stuck_seconds, self._write_state, self.abort)
        self.app = self._serve

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.flow: HeldFlow = HeldFlow(self.transport)
        self._wire = Wire(self.transport, self.below)
        self.host = self.client[0] if self.client else ""
        self._begin_head()
        if self.end_handshake is not None:
            self.end_handshake()
        self.table.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._unset_keepalive_if_required()  # which would keep this one
        self._wire = None
        if self._discard_timer is not None:
            self._discard_timer.cancel()
        self.table.leave(self)
        # uvicorn tells only the newest request. An older one that is still being answered would
        # go on, and over TLS it would write to a transport that is gone.
        self._abandon_requests()
        super().connection_lost(exc)
        self.let_go()

    def let_go(self) -> None:
        """Keep no reference to what keeps this one: it is freed at once."""
        self.parser = None  # type: ignore[assignment]  # as uvicorn does
        self.app = self.config.loaded_app
        self.scope = {}  # type: ignore[typeddict-item]
        self.cycle = None  # type: ignore[assignment]
        self.below = None
        self.watch.stop()
        self.pipeline.clear()
        self._requests.clear()
        self._waiting = b""

    def _abandon_requests(self) -> None:
        for request in self._requests:
            request.disconnected = True
            request.waiting_for_100_continue = False  # uvicorn would still say it
            request.message_event.set()

    def abort(self) -> None:
        """Close at once; what was not written yet is lost."""
        self._abandon_requests()
        (self.below or self.transport).abort()

    def has_left(self) -> bool:
        """Whether the connection is lost, or its client has closed it while nothing is read."""
        if self._wire is None or self._wire.is_closing():
            return True
        return self.flow.read_paused and self._wire.is_closed_by_peer()

    @property
    def writes(self) -> bool:
        """Whether something is written that the system has not taken."""
        return self._wire is not None and self._wire.buffered() > 0

    def _untaken(self) -> int:
        return 0 if self._wire is None else self._wire.untaken()

    def data_received(self, data: bytes) -> None:
        if self._reads_requests:
            self._parse(self._waiting + data)
        else:
            self._discard(len(data))

    @property
    def _reads_requests(self) -> bool:
        return self._reading is Reading.REQUESTS and not self.transport.is_closing()

    def _parse(self, data: bytes) -> None:
        """Parse until a request waits for the one before it; what is left waits too."""
        given = memoryview(data)
        while given and not self.pipeline and self._reads_requests:
            piece, given = given[:PIECE_BYTES], given[PIECE_BYTES:]
            self._gathered += len(piece)
            try:
                self.parser.feed_data(piece)
                self._check_gathered()
            except (httptools.HttpParserError, HttpRefusal):
                self.send_400_response("Invalid HTTP request received.")
            except httptools.HttpParserUpgrade as upgrade:
                rest = bytes(piece[upgrade.args[0] :]) + given
                given = memoryview(self._without_upgrade() + rest)
            if self._has_answer:
                self._discard(len(piece))
        self._waiting = bytes(given) if self._reads_requests else b""
        self.flow.hold(bool(self._waiting or self.pipeline))

    @property
    def _has_answer(self) -> bool:
        """Whether what arrives is the body of a request that has its answer."""
        return self._in_body and self.cycle.response_complete

    def _check_gathered(self) -> None:
        """Bound heads, and what stands around bodies: the parser keeps a field until its end."""
        limit = self.table.limits.head_bytes
        if self._gathered > limit:
            message = f"its head, or fields behind its body, exceed {limit} bytes"
            self._refused = HttpRefusal(431, "head_too_large", "request", message)
            raise self._refused

    def _without_upgrade(self) -> bytes:
        """The head that was read, for a new parser: the old one ends with a wish to upgrade."""
        version = self.parser.get_http_version().encode()
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return without_upgrade(line, self.headers)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._gathered = 0
        self._unset_keepalive_if_required()
        self._begin_head()
        self._in_body = False
        self._unread = 0
        self.scope["extensions"] = {EXTENSION: {"connection": self}}
        self.table.busy(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer of the body: not to be merged (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._gathered = 0
        self._end_head()
        self._unset_keepalive_if_required()
        version = self.parser.get_http_version()
        self._refused = head_refused(self.parser.get_method(), version, self.headers)
        if self._refused is not None:
            raise self._refused
        if self.parser.should_upgrade():
            return  # it is read again
        self.url = with_path(self.url)
        if version == "1.0":
            self.expect_100_continue = False  # RFC 9110, 15.2
        super().on_headers_complete()
        self._in_body = True
        self._requests.append(self.cycle)

    def on_message_complete(self) -> None:
        self._gathered = 0
        if not self.parser.should_upgrade():
            self._in_body = False
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._gathered = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._requests.popleft()
        super().on_response_complete()
        self._answered += 1
        self.watch.start()
        if self.transport.is_closing():
            return
        self._parse(self._waiting)
        if not self._requests and not self._in_head:
            self.table.rest(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.watch.start()

    def _write_state(self) -> tuple[int, int] | None:
        """What changes while a client reads; ``None`` if nothing is there for it."""
        return (self._answered, self._untaken()) if self.writes else None

    @property
    def answers(self) -> bool:
        """Whether a request is being answered, or is whole and waits for that."""
        return any(one.response_started or not one.more_body for one in self._requests)

    def send_400_response(self, msg: str) -> None:
        """The answer to what cannot be parsed, and to a head that is too large or too slow."""
        if self._reading is Reading.UNTIL_CLOSED or self.transport.is_closing():
            return
        if self.answers:  # an error would be taken for the response to another request
            self._end_with_the_last()
            return
        if self._has_answer:
            self._close_late()
            return
        self._abandon_requests()  # the one whose body is wrong
        refused = self._refused or HttpRefusal(400, "bad_request", "request", msg)
        self.transport.write(closing_response(refused))
        self._close_late()

    def _end_with_the_last(self) -> None:
        """Read no more; a request whose body is not whole is not answered."""
        last = self._requests[-1]
        if last.more_body and not (self.pipeline and self.pipeline[0][0] is last):
            self.transport.close()  # its answer has begun
            return
        if last.more_body:
            self.pipeline.popleft()
            self._requests.pop()
        self._requests[-1].keep_alive = False
        self._reading = Reading.NOTHING
        self._end_head()

    async def _serve(
        self, scope: HTTPScope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Run the application for the oldest unanswered request."""
        if not self._requests:
            return  # the client has left
        request = self._requests[0]
        await self.config.loaded_app(scope, receive, partial(self._respond, request))

    async def _respond(self, request: RequestResponseCycle, message: ASGISendEvent) -> None:
        """Send a part of a response, around two faults of uvicorn 0.54.

        It sends chunks to HTTP/1.0, where the end of the connection ends a body of unknown length.
        It closes a connection while the client sends, which then loses the response.
        """
        ends = False
        if message["type"] == "http.response.body":
            ends = not message.get("more_body", False)
            if self._unframed:
                request.expected_content_length = len(message.get("body", b""))
        elif message["type"] == "http.response.start" and request.scope["http_version"] == "1.0":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._unframed = b"content-length" not in names
            request.chunked_encoding = False if self._unframed else None
        late = ends and not request.keep_alive and self._may_get_more(request)
        if late:
            request.keep_alive = True
            self.end_with_the_oldest()
        await request.send(message)
        if ends and (late or (self._reading is Reading.NOTHING and not self._requests)):
            self._close_late()

    def _may_get_more(self, request: RequestResponseCycle) -> bool:
        """Whether its client may send more: the system would then drop a response that it reads."""
        if self.transport.can_write_eof():
            return True
        if self._unframed:
            return request.more_body  # over TLS only its end tells that of the response
        behind = self._in_head or self._gathered or self._waiting or self.pipeline
        return bool(request.more_body or behind or not self._reads_requests)

    def end_with_the_oldest(self) -> None:
        """Read no more, and answer no request that waits for the oldest."""
        if self._reads_requests:
            self._reading = Reading.NOTHING
            self._end_head()
        self._waiting = b""
        self.pipeline.clear()
        while len(self._requests) > 1:
            self._requests.pop()

    def shutdown(self) -> None:
        self._server_ends = True
        if self._reading is Reading.UNTIL_CLOSED:
            self.transport.close()  # uvicorn would wait for a request that has no answer
        else:
            super().shutdown()

    def _close_late(self) -> None:
        """Close after the client has closed, or sent ``unread_bytes``, or after ``body_seconds``.

        ``body_seconds`` begin anew while the client still takes what was written. If the connection
        were closed while the client sends, its system would drop the response.
        """
        if self._reading is Reading.UNTIL_CLOSED or self.transport.is_closing():
            return
        if self._server_ends:
            self.transport.close()
            return
        self._reading = Reading.UNTIL_CLOSED
        self._end_head()
        self.table.rest(self)
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has left: the event loop sees it next
                self.transport.write_eof()
        self.flow.hold(False)
        self.flow.resume_reading()
        self._abort_late(None)

    def _abort_late(self, before: int | None) -> None:
        left = self._untaken()
        if before is not None and (left == before or not self.writes):
            self.abort()
            return
        seconds = self.table.limits.body_seconds
        self._discard_timer = self.loop.call_later(seconds, self._abort_late, left)

    def _discard(self, size: int) -> None:
        self._unread += size
        if self._unread > self.table.limits.unread_bytes:
            self.abort()

    def _begin_head(self) -> None:
        self._in_head = True
        if self._head_timer is None:
            seconds = self.table.limits.head_seconds
            self._head_timer = self.loop.call_later(seconds, self._late)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if self.flow.read_paused:  # the rest may be here
            self._begin_head()
            return
        message = f"no whole head within {self.table.limits.head_seconds:g} s"
        self._refused = HttpRefusal(408, "request_timeout", "request", message)
        answers = self.answers
        self.send_400_response(message)
        if not answers:
            self.transport.close()  # nothing is unread that could make its system drop the answer
