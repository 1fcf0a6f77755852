"""Bounds each connection of the HTTP door: heads in size and time, and what a client leaves unread.

uvicorn parses and writes; it bounds neither the bytes before the end of a head nor the time until
then, and it refuses new connections once there are too many. Here an idle connection makes room,
and one over TLS counts before its handshake has ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import select
import sys
import termios
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from router.http.connection.table import ConnectionTable
from router.http.errors import HttpRefusal, body_of

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent, HTTPScope
    from uvicorn.config import Config
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

_UPGRADE = (b"upgrade", b"http2-settings")
"""Headers, and words of ``connection``, by which a client wishes for another protocol."""

EXTENSION = "kvrelay.connection"
"""Where a request's scope has its connection, among the extensions."""


_CLOSED = getattr(select, "POLLRDHUP", 0)
"""What ``poll`` tells of a client that has closed its end; elsewhere than on Linux only errors."""


class Handshake(Protocol):
    """What comes before HTTP on a connection."""

    def end(self) -> None: ...


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
        self.handshake: Handshake | None = None
        self.below: asyncio.Transport | None = None  # what carries TLS
        self._is_lost = False
        self._head_bytes = 0
        self._heads = 0  # that were read
        self._in_head = True
        self._unread = 0
        self._discards = False  # what arrives is dropped: no further request is read
        self._ends = False  # with the last of ``_requests``; what arrives is dropped too
        self._answered = 0
        self._unframed = False  # the response ends with the connection
        self._refused: HttpRefusal | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._discard_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._requests: list[RequestResponseCycle] = []  # not answered in full, oldest first
        self.app = self._serve

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self.host = self.client[0] if self.client else ""
        self._begin_head()
        if self.handshake is not None:
            self.handshake.end()
        self.table.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._is_lost = True
        for timer in (self._discard_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
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
        self.pipeline.clear()
        self._requests = []

    def _abandon_requests(self) -> None:
        for request in self._requests:
            request.disconnected = True
            request.message_event.set()

    def abort(self) -> None:
        """Close at once; what was not written yet is lost."""
        self._abandon_requests()
        self._lowest.abort()

    @property
    def _lowest(self) -> asyncio.Transport:
        """The transport on the socket: that of a connection over TLS forgets what it has closed."""
        return self.below or self.transport

    def has_left(self) -> bool:
        """Whether the connection is lost, or its client has closed it while nothing is read."""
        if self._is_lost or self._lowest.is_closing():
            return True
        one = self._lowest.get_extra_info("socket")
        if one is None or not self.flow.read_paused:
            return False
        poll = select.poll()
        poll.register(one.fileno(), _CLOSED)
        return bool(poll.poll(0))

    def untaken(self) -> int:
        """Bytes that were written and are not known to have reached the client's system."""
        if self._is_lost:
            return 0
        waiting = bytes(4)
        with suppress(OSError, AttributeError):  # there is no socket, or its system does not tell
            number = self._lowest.get_extra_info("socket").fileno()
            waiting = fcntl.ioctl(number, termios.TIOCOUTQ, waiting)
        return self._buffered() + int.from_bytes(waiting, sys.byteorder)

    def _buffered(self) -> int:
        """Bytes that were written and that the system has not taken yet."""
        size = self._lowest.get_write_buffer_size()
        if self.below is not None and not self.transport.is_closing():
            size += self.transport.get_write_buffer_size()
        return size

    def data_received(self, data: bytes) -> None:
        if self._discards or self._ends:
            self._discard(len(data))
            return
        began_in_head, heads = self._in_head, self._heads
        try:
            self.parser.feed_data(data)
            if began_in_head and self._in_head and self._heads == heads:
                self._count(len(data))
        except (httptools.HttpParserError, HttpRefusal):
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data[upgrade.args[0] :])

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Read the request again without its wish for another protocol, which a server may ignore.

        Java's client wishes for HTTP/2 in every first request. The parser stops at the end of such
        a head, so the body would be lost.
        """
        if self.parser.get_method() == b"CONNECT":
            self.send_400_response("CONNECT is for proxies.")
            return
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                words = (word.strip() for word in value.split(b","))
                kept = [word for word in words if word.lower() not in _UPGRADE]
                lines.append(b"connection: " + b", ".join(kept))
            elif name not in _UPGRADE:
                lines.append(b"%s: %s" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._begin_head()
        self._head_bytes = 0
        self.scope["extensions"] = {EXTENSION: {"connection": self}}
        self.table.busy(self)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._in_head:  # else it is a trailer of the body: not to be merged (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._heads += 1
        self._end_head()
        self._unset_keepalive_if_required()
        self._require_host()
        if self.parser.should_upgrade():
            return  # it is read again
        super().on_headers_complete()
        self._requests.append(self.cycle)

    def _require_host(self) -> None:
        """RFC 9112, 3.2: a request of HTTP/1.1 names its host, once."""
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            message = f"needs one Host header, got {hosts}"
            self._refused = HttpRefusal(400, "bad_request", "request", message)
            raise self._refused

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._discard(len(body))
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._requests = [one for one in self._requests if not one.response_complete]
        super().on_response_complete()
        if not self._requests and not self.transport.is_closing():
            self.table.rest(self)
        self._answered += 1
        if self._unread_timer is None:
            self._drop_unread(None)

    def _drop_unread(self, before: tuple[int, int] | None) -> None:
        """Abort if no byte of a complete response was taken since ``before``: the last look."""
        self._unread_timer = None
        if self._is_lost or not self._buffered():
            return
        now = self._answered, self.untaken()
        if now == before:
            self.abort()
            return
        seconds = self.table.limits.stuck_seconds
        self._unread_timer = self.loop.call_later(seconds, self._drop_unread, now)

    @property
    def _answers(self) -> bool:
        """Whether a request is being answered, or is whole and waits for that."""
        return any(one.response_started or not one.more_body for one in self._requests)

    def send_400_response(self, msg: str) -> None:
        """The answer to what cannot be parsed, and to a head that is too large or too slow."""
        if self._discards or self.transport.is_closing():
            return
        if self._answers:  # an error would be taken for the response to another request
            last = self._requests[-1]
            if last.more_body and not (self.pipeline and self.pipeline[0][0] is last):
                self.transport.close()
                return
            if last.more_body:  # it waits for those before it, and is never answered
                self.pipeline.popleft()
                self._requests.pop()
            self._ends = True
            self._end_head()
            return
        self._abandon_requests()  # the one whose body is wrong
        refused = self._refused or HttpRefusal(400, "bad_request", "request", msg)
        content = json.dumps(body_of(refused)).encode()
        head = STATUS_LINE[refused.status] + (
            b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            % len(content)
        )
        self.transport.write(head + content)
        self._close_late()

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
        It closes a connection before it has read the whole request, so the client loses the
        response.
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
        last = self._ends and self._requests[-1:] == [request]
        ends_late = ends and (last or (request.more_body and not request.keep_alive))
        request.keep_alive |= ends_late
        await request.send(message)
        if ends_late:
            self._close_late()

    def _close_late(self) -> None:
        """Close after the client has closed, or sent ``unread_bytes``, or after ``body_seconds``.

        ``body_seconds`` begin anew while the client still takes what was written. If the connection
        were closed while the client sends, its system would drop the response.
        """
        if self._discards or self.transport.is_closing():
            return
        self._discards = True
        self._end_head()
        self.table.rest(self)
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has left: the event loop sees it next
                self.transport.write_eof()
        self.flow.resume_reading()
        self._abort_late(None)

    def _abort_late(self, before: int | None) -> None:
        left = self.untaken()
        if before is not None and (left == before or not self._buffered()):
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
        message = f"no whole head within {self.table.limits.head_seconds:g} s"
        self._refused = HttpRefusal(408, "request_timeout", "request", message)
        answers = self._answers
        self.send_400_response(message)
        if not answers:
            self.transport.close()  # everything was read

    def _count(self, size: int) -> None:
        self._head_bytes += size
        limit = self.table.limits.head_bytes
        if self._head_bytes > limit:
            message = f"its head exceeds {limit} bytes"
            self._refused = HttpRefusal(431, "head_too_large", "request", message)
            raise self._refused
