"""The table between ``kvrelay.errors``, gRPC status and HTTP status, with ``google.rpc`` details.

``to_status`` makes the status that a server sends; ``from_rpc_error`` makes the same error from it
on the client's side. Codes that gRPC itself produces (closed socket, message too large) are mapped
here too.
"""

from __future__ import annotations

import asyncio
import re
from typing import Never, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, PreconditionFailure, RetryInfo
from google.rpc.status_pb2 import Status

from kvrelay.errors import (
    Corrupt,
    DeadlineExceeded,
    Draining,
    Exhausted,
    KvrelayError,
    Mismatch,
    NotFound,
    Rejected,
    Unavailable,
    Unservable,
)

DETAILS_KEY = "grpc-status-details-bin"
DOMAIN = "kvrelay"
DEFAULT_RETRY_SECONDS = 1.0
DISCONNECT_TURNS = 6  # of the event loop, within which a disconnect is noticed
MAX_MESSAGE_BYTES = 1000  # a status is HTTP/2 headers (8 KiB), percent-encoded and twice in them

_CODES: tuple[tuple[type[KvrelayError], grpc.StatusCode, int], ...] = (
    (Rejected, grpc.StatusCode.INVALID_ARGUMENT, 400),
    (NotFound, grpc.StatusCode.NOT_FOUND, 404),
    (Mismatch, grpc.StatusCode.FAILED_PRECONDITION, 412),
    (Unservable, grpc.StatusCode.FAILED_PRECONDITION, 422),
    (Exhausted, grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    (Unavailable, grpc.StatusCode.UNAVAILABLE, 503),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    (Corrupt, grpc.StatusCode.DATA_LOSS, 502),
    (KvrelayError, grpc.StatusCode.INTERNAL, 500),
)
"""Of each error, the first line that it is an instance of: its gRPC code and its HTTP status."""

# gRPC's text for a connection that it could not make: the address, and why the last attempt failed.
_NOT_CONNECTED = re.compile(
    r"failed to connect to all addresses; last error: \w+: (?:ipv[46]:)?(unix:[^:]+|\S+?:\d+):"
    r" (?:Failed to connect to remote host: )?(?P<why>.*)",
    re.DOTALL,
)
_NOT_RESOLVED = re.compile(r"(?:errors resolving|DNS resolution failed for) (\S+): .*", re.DOTALL)
_REFUSED = re.compile(r"Connection refused|No such file")
_SILENT = re.compile(r"before receiving SETTINGS frame")
_FOREIGN = re.compile(r"Expected SETTINGS frame")
# A server that requires TLS, or a client certificate, closes the connection without a reason.
_HANDSHAKE = re.compile(r"handshake failed|verification check failed|Socket closed$")
_TLS_HINT = (
    "; where there is TLS: is it on both sides (--tls-ca), with a certificate of that authority"
    " here (--tls-cert), and one for that name there (--tls-name)?"
)

# gRPC's texts for a message above the limit of either side, and for a deadline that passed.
_TOO_LARGE = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")
_LATE = re.compile(r"^Deadline Exceeded$|^Stream removed \(Deadline Exceeded\)$")

M = TypeVar("M")
Trailers: TypeAlias = tuple[tuple[str, str | bytes], ...]


class NothingListens(Unavailable):
    """Every connection to the address is refused: no server runs there."""


class _Aborting(Protocol):
    """The part of a servicer context that is used here."""

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Trailers = (),
    ) -> Never: ...


def code_of(error: KvrelayError) -> grpc.StatusCode:
    """The status code of an error."""
    return next(code for kind, code, _ in _CODES if isinstance(error, kind))


def http_status_of(error: KvrelayError) -> int:
    """The HTTP status of an error."""
    return next(status for kind, _, status in _CODES if isinstance(error, kind))


def to_status(error: KvrelayError) -> Status:
    """The whole ``google.rpc.Status``: code, message and one detail."""
    number: int = code_of(error).value[0]
    status = Status(code=number, message=_cut(str(error)))
    status.details.add().Pack(_detail(error))
    return status


async def abort(context: _Aborting, error: KvrelayError) -> Never:
    """End the call with this error's status."""
    status = to_status(error)
    trailers = ((DETAILS_KEY, status.SerializeToString()),)
    await abort_with_code(context, code_of(error), status.message, trailers)


async def abort_with_code(
    context: _Aborting, code: grpc.StatusCode, message: str, trailers: Trailers = ()
) -> Never:
    """``context.abort`` without its two leaks.

    Its exception keeps the frames, which keep the call and its memory in gRPC's core: the cycle is
    broken here. gRPC never frees a status that cannot be sent: so a call whose client has
    disconnected gets the time to notice that first.
    """
    for _ in range(DISCONNECT_TURNS):
        await asyncio.sleep(0)
    try:
        await context.abort(code, message, trailers)
    except grpc.aio.AbortError as aborted:
        aborted.__context__ = None
        asyncio.get_running_loop().call_soon(aborted.with_traceback, None)
        raise


def from_rpc_error(error: grpc.RpcError) -> KvrelayError:
    """The ``KvrelayError`` that the server sent, or one for a failure of gRPC itself."""
    if not isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return Unavailable(str(error))
    code, text, status = error.code(), error.details() or "", None
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            status = _parse(value)
    known = None if status is None else _from_detail(code, text, status)
    return known or _from_code(code, text)


def sent_by_server(error: grpc.RpcError) -> bool:
    """Whether a kvrelay server sent this error; otherwise the connection or the peer is lost."""
    if not isinstance(error, grpc.aio.AioRpcError | grpc.Call):
        return False
    return any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def checked_response(message: M | None, sender: str) -> M:
    """The response, or ``Corrupt`` if it did not parse.

    asyncio gRPC logs a response that does not parse and returns ``None`` in its place.
    """
    if message is None:
        raise Corrupt("response", f"{sender} sent bytes that are no message of this method")
    return message


def _cut(message: str) -> str:
    raw = message.encode("utf-8", "replace")
    if len(raw) <= MAX_MESSAGE_BYTES:
        return message
    return raw[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore") + "..."


def _detail(error: KvrelayError) -> Message:
    match error:
        case Rejected():
            violation = BadRequest.FieldViolation(
                field=error.field, description=_cut(error.message)
            )
            return BadRequest(field_violations=[violation])
        case Mismatch():
            conflict = PreconditionFailure.Violation(
                type="MISMATCH", subject=error.field, description=_cut(error.message)
            )
            return PreconditionFailure(violations=[conflict])
        case Exhausted():
            nanos = int(error.retry_after * 1e9)
            delay = Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)
            return RetryInfo(retry_delay=delay)
    info = ErrorInfo(reason=type(error).__name__.upper(), domain=DOMAIN)
    if isinstance(error, Corrupt):
        info.metadata["field"] = error.field
    return info


def _parse(raw: bytes) -> Status | None:
    try:
        return Status.FromString(raw)
    except DecodeError:
        return None


def _from_detail(code: grpc.StatusCode, text: str, status: Status) -> KvrelayError | None:
    bad, conflict = BadRequest(), PreconditionFailure()
    retry, info = RetryInfo(), ErrorInfo()
    for detail in status.details:
        if detail.Unpack(bad) and bad.field_violations:
            return Rejected(bad.field_violations[0].field, bad.field_violations[0].description)
        if detail.Unpack(conflict) and conflict.violations:
            return Mismatch(conflict.violations[0].subject, conflict.violations[0].description)
        if detail.Unpack(retry) and code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Exhausted(text, retry.retry_delay.ToNanoseconds() / 1e9)
        if detail.Unpack(info) and info.reason == "UNSERVABLE":
            return Unservable(text)
        if info.reason == "DRAINING":
            return Draining(text)
        if info.reason == "CORRUPT":
            field = info.metadata["field"]
            return Corrupt(field, text.removeprefix(f"{field}: "))
    return None


def _from_code(code: grpc.StatusCode, text: str) -> KvrelayError:
    """The error for a status without our details: mostly gRPC's own."""
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE:
            return Rejected("request", text)
        case grpc.StatusCode.NOT_FOUND:
            return NotFound(text)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return Mismatch("protocol", text)
        case grpc.StatusCode.UNIMPLEMENTED:
            return Mismatch(
                "protocol",
                f"{text.rstrip('!')}: is it the address of such a service, of the same release?",
            )
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return Rejected("credentials", text)
        case grpc.StatusCode.RESOURCE_EXHAUSTED if (match := _TOO_LARGE.search(text)) is not None:
            return Rejected(
                "request", f"has {match[1]} bytes, and a message can have {match[2]}: send less"
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Exhausted(text, DEFAULT_RETRY_SECONDS)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            late = "the time limit passed before the answer was complete: raise the call's timeout"
            return DeadlineExceeded(late if _LATE.search(text) else text)
        case grpc.StatusCode.DATA_LOSS:
            return Corrupt("response", text)
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED | grpc.StatusCode.ABORTED:
            return _not_connected(text) or Unavailable(text)
        case grpc.StatusCode.INTERNAL if "RST_STREAM" in text:
            return Unavailable(text)  # a peer that died between two frames
    return KvrelayError(f"{code.name}: {text}")


def _not_connected(text: str) -> Unavailable | None:
    """The error in words if ``text`` says that gRPC could not connect."""
    if (match := _NOT_RESOLVED.match(text)) is not None:
        return Unavailable(f"the name in {match[1]} has no address: is it spelled right?")
    if (match := _NOT_CONNECTED.match(text)) is None:
        return None
    address, why = unquote(match[1]), match["why"]
    if _REFUSED.search(why):
        return NothingListens(f"nothing listens at {address}")
    if _SILENT.search(why):
        return Unavailable(f"{address} accepts connections but does not answer")
    if _FOREIGN.search(why):
        return Unavailable(f"{address} is no gRPC server: is it the address of another service?")
    hint = _TLS_HINT if _HANDSHAKE.search(why) else ""
    return Unavailable(f"no connection to {address}: {why}{hint}")
