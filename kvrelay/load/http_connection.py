"""HTTP/1.1 for one purpose: POST a JSON body, read the response's body as it comes.

``asyncio`` streams and nothing else. A connection whose response was read to its end is used again.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvrelay.errors import Rejected, Unavailable

LINE_BYTES = 64 << 10
CHUNK_BYTES = 32 << 20
IDLE_CONNECTIONS = 1024
CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class HttpOrigin:
    """Where requests are sent: ``path`` is the URL's own, without a slash at its end."""

    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def parse(cls, field: str, url: str) -> HttpOrigin:
        """``Rejected`` names the field if it is no HTTP URL."""
        try:
            split = urlsplit(url)
            port = split.port
        except ValueError as error:
            raise Rejected(field, f"{url!r} is no URL: {error}") from None
        if split.scheme not in ("http", "https") or not split.hostname:
            raise Rejected(field, f"{url!r}: wanted is http://HOST:PORT or https://HOST:PORT")
        tls = split.scheme == "https"
        return cls(split.hostname, port or (443 if tls else 80), split.path.rstrip("/"), tls)

    def head(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"host: {host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class HttpResponse:
    """The head of a response; ``body`` yields its bytes as they come, each with its time."""

    def __init__(
        self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader
    ) -> None:
        self.status = status
        self.headers = headers
        self.complete = False  # the body was read, and the connection may be used again
        self._reader = reader

    async def body(self) -> AsyncIterator[tuple[float, bytes]]:
        """Raises ``Unavailable`` if the connection closes before the body ends."""
        clock = time.perf_counter
        reader = self._reader
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := _chunk_size(await reader.readline()):
                data = await reader.readexactly(size + 2)
                yield clock(), data[:-2]
            while (await reader.readline()).strip():
                pass  # trailers
        elif (length := self.headers.get("content-length")) is not None:
            left = int(length)
            while left:
                data = await reader.read(min(left, LINE_BYTES))
                if not data:
                    raise asyncio.IncompleteReadError(b"", left)
                left -= len(data)
                yield clock(), data
        else:
            while data := await reader.read(LINE_BYTES):
                yield clock(), data
            return  # the end of the connection is the end of the body
        self.complete = self.headers.get("connection", "").lower() != "close"

    async def text(self, limit: int = LINE_BYTES) -> str:
        """The beginning of the body."""
        found = b""
        async for _, data in self.body():
            found += data
            if len(found) >= limit:
                break
        return found[:limit].decode(errors="replace")


def _chunk_size(line: bytes) -> int:
    if not line.endswith(b"\n"):
        raise asyncio.IncompleteReadError(line, None)
    size = int(line.split(b";")[0], 16)
    if not 0 <= size <= CHUNK_BYTES:
        raise ValueError(f"a chunk of {size} bytes")
    return size


class HttpConnections:
    """Connections to one origin, as many as there are requests at once."""

    def __init__(self, origin: HttpOrigin) -> None:
        self._origin = origin
        self._tls = ssl.create_default_context() if origin.tls else None
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    @asynccontextmanager
    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncGenerator[HttpResponse, None]:
        """Send a request; leaving the context early closes its connection.

        An idle connection that the server has closed meanwhile is replaced once.
        """
        lengths = {"content-length": str(len(body))} if body else {}
        data = self._origin.head(method, path, {**headers, **lengths}) + body
        response: HttpResponse | None = None
        try:
            while response is None:
                fresh = not self._idle
                reader, writer = await self._open() if fresh else self._idle.pop()
                try:
                    writer.write(data)
                    await writer.drain()
                    response = await _response(reader)
                except (ConnectionError, asyncio.IncompleteReadError):
                    writer.close()
                    if fresh:
                        raise
                except BaseException:
                    writer.close()
                    raise
            try:
                yield response
            finally:
                if response.complete and len(self._idle) < IDLE_CONNECTIONS:
                    self._idle.append((reader, writer))
                else:
                    writer.close()
        except asyncio.IncompleteReadError as error:
            raise Unavailable("the server closed the connection before its answer ended") from error
        except (OSError, asyncio.LimitOverrunError, ValueError) as error:
            said = str(error) or type(error).__name__
            raise Unavailable(f"HTTP to {self._origin.host}: {said}") from error

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        origin = self._origin
        async with asyncio.timeout(CONNECT_SECONDS):
            return await asyncio.open_connection(
                origin.host, origin.port, ssl=self._tls, limit=LINE_BYTES
            )


async def _response(reader: asyncio.StreamReader) -> HttpResponse:
    """The head of the next response; informational ones are skipped."""
    while True:
        line = await reader.readline()
        if not line:
            raise asyncio.IncompleteReadError(b"", None)
        words = line.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
            raise ValueError(f"{line[:40]!r} is no HTTP/1.1 response")
        status = int(words[1])
        headers: dict[str, str] = {}
        while (line := (await reader.readline()).strip()) and len(headers) < 200:
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        if status >= 200:
            return HttpResponse(status, headers, reader)
