"""Rules for the head of a request that uvicorn leaves out, and the answer to a wrong one."""

from __future__ import annotations

import json
from collections.abc import Iterable

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from router.http.errors import HttpRefusal, body_of
from router.http.headers import request_id_of

Fields = Iterable[tuple[bytes, bytes]]
"""Names in lower case and values, as they arrived."""

_UPGRADE = (b"upgrade", b"http2-settings")
"""Headers, and words of ``connection``, by which a client wishes for another protocol."""


def head_refused(method: bytes, version: str, fields: Fields) -> HttpRefusal | None:
    """CONNECT is no request for a server; RFC 9112, 3.2: one of HTTP/1.1 names its host, once."""
    hosts = sum(name == b"host" for name, _ in fields)
    message = ""
    if hosts > 1 or (not hosts and version == "1.1"):
        message = f"needs one Host header, got {hosts}"
    elif method == b"CONNECT":
        message = "CONNECT is for proxies."
    return HttpRefusal(400, "bad_request", "request", message) if message else None


def closing_response(refused: HttpRefusal) -> bytes:
    """The whole response to a request that no application sees; the connection ends."""
    content = json.dumps(body_of(refused)).encode()
    head = (
        b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
        b"x-request-id: %s\r\n\r\n" % (len(content), request_id_of({}).encode())
    )
    return STATUS_LINE[refused.status] + head + content


def with_path(url: bytes) -> bytes:
    """The URL, or the path ``/`` for one that has a host and no path (RFC 9110, 4.2.3)."""
    if url.startswith((b"/", b"*")):
        return url
    parsed = httptools.parse_url(url)
    return url if parsed.path else b"/" + (b"?" + parsed.query if parsed.query else b"")


def without_upgrade(line: bytes, fields: Fields) -> bytes:
    """A head without its wish for another protocol, which a server may ignore.

    Java's client wishes for HTTP/2 in every first request. ``line`` is the request line.
    """
    lines = [line]
    for name, value in fields:
        if name == b"connection":
            words = (word.strip() for word in value.split(b","))
            kept = [word for word in words if word.lower() not in _UPGRADE]
            lines.append(b"connection: " + b", ".join(kept))
        elif name not in _UPGRADE:
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join([*lines, b"", b""])
