"""Errors in OpenAI's shape: one table from ``kvrelay.rpc.status``, and what only HTTP refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from kvrelay.errors import Corrupt, Exhausted, KvrelayError, Mismatch, NotFound, Rejected
from kvrelay.rpc.status import http_status_of

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]
ErrorBody: TypeAlias = dict[str, dict[str, str | int | None]]

NAMES: Mapping[str, str] = {
    "sampling.": "",
    "prompt_token_ids": "prompt",
    "token_ids.ids": "prompt",
    "token_ids": "prompt",
    "chat.template_kwargs": "chat_template_kwargs",
    "chat.messages": "messages",
    "chat.tool": "tool",
}
"""Beginnings of the names that the protocol gives to fields, and their names in a body."""

TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
SERVER_ERRORS = 500
MAX_CHARS = 1000  # of a message: it may quote what the client sent


class HttpRefusal(Rejected):
    """A request that HTTP itself refuses, with its status; ``code`` as OpenAI's clients know it.

    ``field`` is none of the body's, so ``param`` does not name it.
    """

    def __init__(
        self, status: int, code: str, field: str, message: str, headers: Headers = ()
    ) -> None:
        super().__init__(field, message)
        self.status = status
        self.code = code
        self.headers = headers


def status_of(error: KvrelayError) -> int:
    """The status of any error that ends a request."""
    return error.status if isinstance(error, HttpRefusal) else http_status_of(error)


def headers_of(error: KvrelayError) -> Headers:
    """The headers that go with the error: when to ask again, how to authenticate."""
    if isinstance(error, HttpRefusal):
        return error.headers
    if isinstance(error, Exhausted):
        return ((b"retry-after", str(max(1, math.ceil(error.retry_after))).encode()),)
    return ()


def body_of(error: KvrelayError) -> ErrorBody:
    """The body: what failed, the field under its name in the request, and whose fault it is."""
    status, param, message = status_of(error), None, str(error)
    if isinstance(error, Rejected | Mismatch) and not isinstance(error, HttpRefusal):
        param = name_of(error.field)[:MAX_CHARS]
        message = f"{param}: {error.message}"
    kind = "server_error" if status >= SERVER_ERRORS else TYPES.get(status, "invalid_request_error")
    shown = message if len(message) <= MAX_CHARS else f"{message[:MAX_CHARS]}..."
    return {"error": {"message": shown, "type": kind, "param": param, "code": _code(error)}}


def name_of(field: str) -> str:
    """The name in the body of a field of the protocol."""
    field = field.removeprefix("leg.")
    if field == "chat":
        return "messages"
    for before, name in NAMES.items():
        if field.startswith(before):
            return name + field.removeprefix(before)
    return field


def _code(error: KvrelayError) -> str:
    match error:
        case HttpRefusal():
            return error.code
        case NotFound():
            return "model_not_found"
        case Exhausted():
            return "rate_limit_exceeded"
        case Rejected():
            return "invalid_value"
        case Corrupt():
            return "corrupt"
    name = type(error).__name__
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")
