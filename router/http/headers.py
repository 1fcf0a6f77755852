"""The headers that identify a request: its id, and the trace that it belongs to."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping

from router.generate.request import is_request_id
from router.http.errors import Headers

REQUEST_ID = "x-request-id"
TRACE = "traceparent"
_TRACE = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?P<trace>(?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}.*"
)


def texts_of(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers as they arrived, by their names in lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in raw}


def request_id_of(headers: Mapping[str, str]) -> str:
    """The id of a request: the client's, else its trace id, else a random one."""
    given = headers.get(REQUEST_ID)
    if given is not None and is_request_id(given):
        return given
    trace = _TRACE.fullmatch(headers.get(TRACE, ""))
    return trace["trace"] if trace else secrets.token_hex(16)


def identifying(headers: Mapping[str, str], request_id: str) -> Headers:
    """The headers of every response: the request's id, and its trace if it has one."""
    own = ((REQUEST_ID.encode(), request_id.encode("ascii")),)
    if (trace := headers.get(TRACE)) is not None and _TRACE.fullmatch(trace):
        return (*own, (TRACE.encode(), trace.encode("latin-1")))
    return own
