"""One HTTP request and its response, on top of ASGI.

The body is received a little ahead and the rest when it is wanted, so what a client sends before
there is memory for it stays with the client. A client that disconnects, or stops reading, cancels
the task that serves it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias, TypeVar, cast

from starlette.types import Receive, Scope, Send

from kvrelay.errors import KvrelayError
from kvrelay.rpc.address import Address
from kvrelay.rpc.security.identity import Tenant
from kvrelay.rpc.server.connections import network_of
from router.generate.request import check_request_id
from router.http.connection.protocol import EXTENSION, BoundedProtocol
from router.http.connection.table import HttpLimits
from router.http.connection.wire import WATCH_SECONDS
from router.http.errors import Headers, HttpRefusal, body_of, headers_of, status_of
from router.http.fields import parse_object
from router.http.headers import REQUEST_ID, identifying, request_id_of, texts_of
from router.http.shapes import DONE, dump, dump_parts
from router.queue.inbox import SMALL_BYTES, Sender
from router.queue.prompts import TextThreads

T = TypeVar("T")
JsonObject: TypeAlias = Mapping[str, object]

LONG_BODY = 8 << 10
"""Bytes. Parsing a longer body may take milliseconds (0.3 us for a byte)."""

QUIET_SECONDS = 15.0
"""Without an event for so long, a stream sends a comment: what stands in between would close it."""

EARLY_SECONDS = 0.2
"""From acceptance to the head of a stream: errors that come sooner still have their status."""

DUMP_SECONDS = 0.005
"""How long an answer is put together before other tasks get the event loop."""

PART_BYTES = 64 << 10
"""Of a whole answer, written at once: what a client does not read is not all written."""

COMMENTS = (b": queued\n", b": working\n")
"""Before the first event and after it. No empty line follows: the ``openai`` client would take it
for the end of an event that has no data. A program that gets no ids gets no comments: ``vllm bench
serve`` strips each piece that it receives, so it would take the events behind one for its rest."""

_JSON = re.compile(
    r"\s*application/json\s*(;(?!\s*charset\s*=)[^;]*|;\s*charset\s*=\s*\"?utf-?8\"?\s*)*",
    re.IGNORECASE,
)
_EVENTS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
)


_ID_LINE = re.compile(r"^id: .*\n", re.MULTILINE)
_AIOHTTP = re.compile(r"Python/\S+ aiohttp/\S+")
"""How aiohttp names itself where a program sets no name of its own.

``vllm bench serve`` 0.32 is such a program, and others have its parser: it takes all of an event
behind ``data:`` for JSON, so an ``id:`` line fails the request. A test of the foreign clients fails
once it reads ids.
"""


class Disconnected(asyncio.CancelledError):
    """The client has left, or reads nothing: there is no response to send."""


class Exchange:
    """``request_id`` is the client's, that of its trace, or drawn here."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: HttpLimits) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self._body = bytearray()
        self._ahead = asyncio.Event()  # all of a small body is here, or the beginning of another
        self._wanted = asyncio.Event()
        self._complete = asyncio.Event()
        self._overflow = False
        self._lost = False
        self._writing_since: float | None = None
        self._written_at = 0.0
        self.status = 0  # of the response, once it has begun
        self._has_events = False
        self._open = False  # a stream that may get more events
        self._ended = False  # nothing watches the client any more
        self._quiet = 0.0  # seconds after which a comment is sent
        self._timer: asyncio.TimerHandle | None = None
        self._commenting: asyncio.Task[None] | None = None
        self._watching: asyncio.TimerHandle | None = None
        self.headers = texts_of(scope["headers"])
        self.request_id = request_id_of(self.headers)
        self.data_only = self._reads_data_only()

    def check(self) -> None:
        """Raise for a request whose headers already show that it cannot be served."""
        if (given := self.headers.get(REQUEST_ID)) is not None:
            check_request_id(given, REQUEST_ID)
        if self._scope["method"] != "POST":
            return
        encoding = self.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            raise HttpRefusal(
                415,
                "unsupported_media_type",
                "content-encoding",
                f"{encoding!r:.80} is not served: send the body as it is",
            )
        if (self._told_length() or 0) > self._limits.body_bytes:
            raise self._too_large()
        told = self.headers.get("content-type", "")
        if _JSON.fullmatch(told) is None:
            raise HttpRefusal(
                415,
                "unsupported_media_type",
                "content-type",
                f"must be application/json in UTF-8, got {told!r:.80}",
            )

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[None]:
        """Cancel what runs inside if the client leaves; then it ends with ``Disconnected``.

        It begins when a small body is complete: a slow one takes no other request's memory.
        """
        task = asyncio.current_task()
        assert task is not None, "a request is served by a task"
        taking = asyncio.ensure_future(self._take_in(task))
        self._watch(task)
        try:
            await self._arrived(self._ahead)
            yield
        except asyncio.CancelledError as error:
            if not self._lost:
                raise
            error.__traceback__ = None  # a frame of the task group refers to it: a cycle
            task.uncancel()
            raise Disconnected from None
        finally:
            taking.cancel()
            self._end()

    def _reads_data_only(self) -> bool:
        """Whether events get no ids; a program on aiohttp asks for these as browsers do."""
        if "last-event-id" in self.headers or "text/event-stream" in self.headers.get("accept", ""):
            return False
        return _AIOHTTP.fullmatch(self.headers.get("user-agent", "")) is not None

    @property
    def peer(self) -> str:
        """The client's address."""
        host, port = self._scope.get("client") or ("", 0)
        return str(Address(host, port)) if host else ""

    def sender(self, tenant: Tenant) -> Sender:
        """Who sends the body, and its size: known, told by the client, or the largest."""
        host, _ = self._scope.get("client") or ("", 0)
        told = self._told_length()
        if self._complete.is_set():
            told = len(self._body)
        return Sender(tenant, network_of(host), self._limits.body_bytes if told is None else told)

    def _told_length(self) -> int | None:
        length = self.headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            return None
        return int(length.lstrip("0")[:20] or "0")

    def path_parameter(self, name: str) -> str:
        """A part of the path, as the route names it."""
        return str(self._scope["path_params"][name])

    async def read(
        self, threads: TextThreads, tenant: Tenant, reader: Callable[[JsonObject], T]
    ) -> T:
        """What ``reader`` makes of the object in the body; of a long one in a thread.

        Raises ``HttpRefusal`` if the body is too large, or late.
        """
        raw = await self._whole_body()
        if len(raw) <= LONG_BODY:
            return reader(parse_object(raw))
        holder = self.sender(tenant).holder
        return await threads.run(holder, len(raw), lambda: reader(parse_object(raw)))

    async def _whole_body(self) -> bytes:
        self._wanted.set()
        await self._arrived(self._complete)
        if self._overflow:
            raise self._too_large()
        body = bytes(self._body)
        self._body.clear()
        return body

    async def _arrived(self, part: asyncio.Event) -> None:
        seconds = self._limits.body_seconds
        try:
            async with asyncio.timeout(seconds):
                await part.wait()
        except TimeoutError:
            message = f"it did not arrive within {seconds:g} s"
            close = ((b"connection", b"close"),)
            raise HttpRefusal(408, "request_timeout", "body", message, close) from None

    async def reply(self, value: JsonObject, status: int = 200, headers: Headers = ()) -> None:
        """Send the whole response, as JSON."""
        content = bytearray()
        until = time.monotonic() + DUMP_SECONDS
        for text in dump_parts(value):
            content += text.encode("utf-8", "replace")
            if time.monotonic() >= until:
                await asyncio.sleep(0)
                until = time.monotonic() + DUMP_SECONDS
        await self.reply_raw(content, b"application/json", status, headers)

    async def reply_raw(
        self, content: bytes | bytearray, kind: bytes, status: int = 200, headers: Headers = ()
    ) -> None:
        """Send the whole response."""
        size, view = len(content), memoryview(content)
        own = ((b"content-type", kind), (b"content-length", str(size).encode()))
        await self._start(status, (*own, *headers))
        for at in range(0, max(size, 1), PART_BYTES):
            end = at + PART_BYTES
            message = {"type": "http.response.body", "body": bytes(view[at:end])}
            await self._write({**message, "more_body": end < size})

    async def fail(self, error: KvrelayError) -> None:
        """Send the error: as the response, or as an event of a stream that has begun."""
        if self._timer is not None:
            self._timer.cancel()  # no comment now begins a stream
        await self._silence()
        whole = bool(self.status) and not self._open
        if self._writing_since is not None and (self._ended or whole):
            self._abort()  # what it has not read cannot be completed, and nothing watches it
            return
        if not self.status:
            await self.reply(body_of(error), status_of(error), headers_of(error))
        elif self._open:
            await self.write(f"data: {dump(body_of(error))}\n\n{DONE}", more=False)

    async def write(self, data: str, more: bool = True) -> None:
        """Send events; they are complete, with their empty lines. The first ones begin a stream."""
        if self._commenting is not None:
            await self._silence()
        if not self.status:
            await self._start_events()
        self._has_events = True
        self._open = more
        if self.data_only:
            data = _ID_LINE.sub("", data)
        message = {"type": "http.response.body", "body": data.encode("utf-8", "replace")}
        await self._write({**message, "more_body": more})

    def keep_alive(self, patient: bool = False) -> None:
        """Begin a stream of events soon, and send a comment whenever it has none for long.

        ``patient``: it begins as late as the first comment must come.
        """
        if self._ended:
            return  # it was accepted and failed in one step of the event loop
        self._quiet = QUIET_SECONDS if patient else EARLY_SECONDS
        self._written_at = asyncio.get_running_loop().time()
        self._look()

    def _look(self) -> None:
        """Send a comment if it is due, and look again when the next one may be."""
        loop = asyncio.get_running_loop()
        silent = loop.time() - self._written_at
        if silent >= self._quiet and self._writing_since is None:
            self._commenting = asyncio.create_task(self._comment())
            self._quiet = QUIET_SECONDS
            silent = 0.0
        self._timer = loop.call_later(max(self._quiet - silent, EARLY_SECONDS), self._look)

    async def _comment(self) -> None:
        if not self.status:
            await self._start_events()
        if self.data_only:
            self._written_at = asyncio.get_running_loop().time()
            return
        body = COMMENTS[self._has_events]
        await self._write({"type": "http.response.body", "body": body, "more_body": True})

    async def _silence(self) -> None:
        """Wait for a comment that is being written."""
        if self._commenting is not None:
            await asyncio.wait((self._commenting,))
            self._commenting = None

    def _end(self) -> None:
        for one in (self._timer, self._commenting, self._watching):
            if one is not None:
                one.cancel()
        self._body.clear()
        self._ended = True

    async def _start_events(self) -> None:
        self._open = True
        self._quiet = QUIET_SECONDS
        await self._start(200, _EVENTS)

    async def _start(self, status: int, headers: Headers) -> None:
        own = identifying(self.headers, self.request_id)
        message = {"type": "http.response.start", "status": status, "headers": [*own, *headers]}
        await self._write(message)
        self.status = status

    async def _write(self, message: dict[str, object]) -> None:
        self._written_at = asyncio.get_running_loop().time()
        self._writing_since = self._written_at
        await self._send(message)
        self._writing_since = None

    async def _take_in(self, task: asyncio.Task[None]) -> None:
        """Receive the body, then wait for the client's end of the connection."""
        while (message := await self._receive())["type"] != "http.disconnect":
            self._body += message.get("body", b"")
            if len(self._body) > self._limits.body_bytes:
                self._overflow = True
                self._body.clear()
                self._complete.set()
            if not message.get("more_body", False):
                self._complete.set()
            if self._complete.is_set() or len(self._body) >= SMALL_BYTES:
                self._ahead.set()
            if len(self._body) >= SMALL_BYTES and not self._complete.is_set():
                await self._wanted.wait()
        self._leave(task)

    def _watch(self, task: asyncio.Task[None]) -> None:
        """Look now and then whether the client has left."""
        if self._connection is not None and self._connection.has_left():
            self._abort()
            self._leave(task)
        else:
            loop = asyncio.get_running_loop()
            self._watching = loop.call_later(WATCH_SECONDS, self._watch, task)

    def _leave(self, task: asyncio.Task[None]) -> None:
        if not self._lost:
            self._lost = True
            task.cancel()

    @property
    def _connection(self) -> BoundedProtocol | None:
        extensions = cast("Mapping[str, Mapping[str, object]]", self._scope.get("extensions", {}))
        connection = extensions.get(EXTENSION, {}).get("connection")
        return connection if isinstance(connection, BoundedProtocol) else None

    def _abort(self) -> None:
        if (connection := self._connection) is not None:
            with suppress(OSError):
                connection.abort()

    def _too_large(self) -> HttpRefusal:
        return HttpRefusal(
            413,
            "request_too_large",
            "body",
            f"more than {self._limits.body_bytes} bytes: send less",
        )
