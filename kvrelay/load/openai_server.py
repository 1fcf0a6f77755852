"""An OpenAI server over HTTP: JSON is posted, server-sent events are read as they come.

The one HTTP client of ``kvrelay load`` and ``kvrelay conform``, on aiohttp. Every failure is a
``KvrelayError``.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import re
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeAlias

import aiohttp
from yarl import URL

from kvrelay.errors import DeadlineExceeded, Exhausted, KvrelayError, Rejected, Unavailable
from kvrelay.rpc.address import Address
from kvrelay.rpc.security.tls import HttpsClient

Json: TypeAlias = "dict[str, object]"
DONE = b"[DONE]"
CONNECT_SECONDS = 10.0
PAGE_SECONDS = 10.0  # for a page, which is no answer of a model
IDLE_SECONDS = 3.0  # less than servers keep a connection, so that none closes when it is used again
EVENT_BYTES = 32 << 20
REFUSED = (429, 503)
UNAUTHORIZED = (401, 403)
NO_HTTP = "Bad status line"  # aiohttp's words for an answer that does not begin as HTTP/1 does
TIMED_OUT = (408, 504)
NO_PAGE = (404, 405)
CLOSED = "the server closed the connection before its answer ended"
RETRY_SECONDS = 1.0
UNREADABLE = (ValueError, RecursionError)  # of json.loads
ESCAPED_SURROGATE = re.compile(rb"\\ud[89a-f]", re.IGNORECASE)


class OpenAIServer:
    """One server; ``url`` with or without ``/v1`` at its end. Connections are used again."""

    def __init__(self, url: str, field: str = "url", https: HttpsClient | None = None) -> None:
        """``Rejected`` names the field if it is no HTTP URL.

        Without ``https`` the system's authorities are trusted.
        """
        try:
            parsed = URL(url.rstrip("/").removesuffix("/v1"))
        except ValueError as error:
            raise Rejected(field, f"{url!r} is no URL: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise Rejected(field, f"{url!r}: give http://HOST:PORT or https://HOST:PORT")
        self.url = parsed
        self._field = field
        self._https = https
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def events(
        self, path: str, body: Json, token: str | None
    ) -> AsyncGenerator[tuple[float, Json], None]:
        """The events of a stream, each with the time at which it was read.

        Closing the generator closes the connection. ``Unavailable`` if it breaks; the event
        ``[DONE]`` may be missing, as in the streams of ``transformers serve``.
        """
        headers = {"accept": "text/event-stream", **_bearer(token)}
        async with self._asked("POST", path, headers, body) as response:
            if response.status != 200:
                raise _refusal(response, await response.text(errors="replace"))
            buffer = b""
            async for data in response.content.iter_any():
                at = time.perf_counter()
                *lines, buffer = (buffer + data).split(b"\n")
                if len(buffer) > EVENT_BYTES:
                    raise Unavailable(f"the server sent an event of over {EVENT_BYTES >> 20} MiB")
                for line in lines:
                    if line.startswith(b"data:"):
                        event = line[5:].strip()
                        if event != DONE:
                            yield at, _event(event)

    async def page(self, path: str, token: str | None = None) -> str | None:
        """A page of the server, ``None`` if it has none."""
        with suppress(KvrelayError):
            response, text = await self._page(path, token)
            return text if response.status == 200 else None
        return None

    async def model(self, token: str | None) -> str:
        """The name of its first model."""
        response, text = await self._page("/v1/models", token)
        if response.status in UNAUTHORIZED:
            said = f"the server refuses /v1/models ({_refusal(response, text)})"
            if self._field == "check":
                advice = "--check sends no key, so name a server that wants none"
                raise Rejected("check", f"{said}: {advice}")
            raise Rejected("api_key", f"{said}: set KVRELAY_API_KEY to a key that it accepts")
        if response.status in NO_PAGE:
            advice = "is it the URL of an OpenAI API? If so, name the model with --model"
            raise Rejected(self._field, f"{self.url} has no page /v1/models: {advice}")
        if response.status != 200:
            raise _refusal(response, text)
        if (name := _text_at(text, "data", 0, "id")) is None:
            raise Rejected("model", "the server lists none: name it with --model")
        return name

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            await session.close()

    async def _page(self, path: str, token: str | None) -> tuple[aiohttp.ClientResponse, str]:
        try:
            async with (
                asyncio.timeout(PAGE_SECONDS),
                self._asked("GET", path, _bearer(token)) as response,
            ):
                return response, await response.text(errors="replace")
        except TimeoutError:
            said = f"no answer to {path} within {PAGE_SECONDS:g} s"
            raise DeadlineExceeded(f"HTTP to {self.url.host}: {said}") from None

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, headers: Mapping[str, str], body: Json | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Leaving the context before the response's end closes its connection.

        A connection that the server has closed while it was idle is replaced by a new one, never
        by another idle one, which the server may have closed as well.
        """
        url = self.url.with_path(self.url.path.rstrip("/") + path)
        with _errors(self.url):
            try:
                response = await self._request(method, url, headers, body)
            except aiohttp.ClientConnectorError:
                raise  # nothing listens
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                response = await self._request(method, url, headers, body, reuses=False)
            async with response:
                yield response

    async def _request(
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        body: Json | None,
        reuses: bool = True,
    ) -> aiohttp.ClientResponse:
        name = None if self._https is None else self._https.name
        session = self._session(reuses)
        return await session.request(method, url, headers=headers, json=body, server_hostname=name)

    def _session(self, reuses: bool = True) -> aiohttp.ClientSession:
        """A session of the running event loop; without ``reuses`` each request has a connection."""
        if reuses not in self._sessions:
            kept = IDLE_SECONDS if reuses else None
            self._sessions[reuses] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,
                    keepalive_timeout=kept,
                    force_close=not reuses,
                    ssl=True if self._https is None else self._https.context,
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                json_serialize=lambda value: json.dumps(value, separators=(",", ":")),
            )
        return self._sessions[reuses]


@contextmanager
def _errors(url: URL) -> Iterator[None]:
    """aiohttp's errors as ours."""
    try:
        yield
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError) as error:
        raise Unavailable(CLOSED) from error
    except (aiohttp.ClientError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ECONNRESET, errno.EPIPE):
            raise Unavailable(CLOSED) from error
        listened = Address(url.host or "", url.port)
        refused = isinstance(error, aiohttp.ClientConnectorError) and isinstance(
            error.os_error, ConnectionRefusedError
        )
        if refused:
            raise Unavailable(f"nothing listens at {listened}") from error
        if isinstance(error, aiohttp.ClientResponseError) and NO_HTTP in error.message:
            advice = f"use its HTTP port, or kvrelay load --router {listened}"
            raise Unavailable(
                f"{listened} does not speak HTTP/1.1: if it is the gRPC port of a router, {advice}"
            ) from error
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
            advice = "name its authority with --tls-ca"
            raise Unavailable(
                f"{listened}: its certificate is refused ({why}): {advice}"
            ) from error
        said = str(error) or type(error).__name__
        raise Unavailable(f"HTTP to {url.host}: {said}") from error


def _bearer(token: str | None) -> Mapping[str, str]:
    return {"authorization": f"Bearer {token}"} if token else {}


def _refusal(response: aiohttp.ClientResponse, text: str) -> KvrelayError:
    """The error of a response that is no stream."""
    text = _text_at(text, "error", "message") or text
    said = f"HTTP {response.status}: {' '.join(text.split())[:200]}"
    if response.status in REFUSED:
        delay = RETRY_SECONDS
        with suppress(KeyError, ValueError):
            asked = float(response.headers["retry-after"])
            delay = asked if 0 <= asked < math.inf else delay
        return Exhausted(said, delay)
    return DeadlineExceeded(said) if response.status in TIMED_OUT else Unavailable(said)


def _event(data: bytes) -> Json:
    try:
        event = json.loads(data.decode(errors="replace"))
        if ESCAPED_SURROGATE.search(data):
            event = json.loads(_readable(json.dumps(event, ensure_ascii=False)))
    except UNREADABLE:
        raise Unavailable(f"the server sent an event that is not JSON: {data[:60]!r}") from None
    if not isinstance(event, dict):
        raise Unavailable(f"the server sent an event that is no object: {data[:60]!r}")
    if (error := event.get("error")) is not None:
        said = error.get("message", error) if isinstance(error, dict) else error
        raise Unavailable(f"the stream ended with an error: {str(said)[:200]}")
    return event


def _text_at(text: str, *keys: str | int) -> str | None:
    """What is at a place of a JSON text."""
    with suppress(*UNREADABLE, LookupError, TypeError):
        value = json.loads(text)
        for key in keys:
            value = value[key]
        return _readable(str(value))
    return None


def _readable(text: str) -> str:
    """With "?" for lone surrogates, which no file and no terminal takes."""
    return text.encode(errors="replace").decode()
