"""Bugs of grpcio that our servers work around. Each names the release it was last seen in.

A test for each fails once grpcio has fixed it: then remove the workaround.
"""

from __future__ import annotations

import asyncio
import codecs
import logging

import grpc

GRPC_LOGGER = "grpc._cython.cygrpc"
UNREADABLE = "Invalid encoding on"  # the beginning of grpcio's message; the header's value follows
SERVING_TASK = "AioServer._server_main_loop"
FIXED_IN: tuple[int, int] | None = None
"""The first release whose server survives a method name that is not UTF-8; ``None``: no release
does. Seen in 1.85.1, the newest one. No issue of grpc/grpc describes it yet."""

log = logging.getLogger("kvrelay.rpc")
_strict = codecs.lookup_error("strict")


def quiet_grpc_log() -> None:
    """Log disconnected clients and unreadable headers for debugging only; idempotent.

    grpcio logs each as an error of the server, with a traceback: any client could fill the log, and
    it would hold a token that was damaged in transit.
    """
    logging.getLogger(GRPC_LOGGER).addFilter(_keeps)


def _keeps(record: logging.LogRecord) -> bool:
    if str(record.msg).startswith(UNREADABLE):
        log.debug("a header is not UTF-8")
        return False
    # The type is not public: compared by name, so that a grpcio without it does no harm.
    kind = record.exc_info[0] if record.exc_info else None
    if kind is None or kind.__name__ != "ExecuteBatchError":
        return True
    log.debug("a client disconnected before its status was sent: %s", record.getMessage())
    return False


def needs_tolerant_decoding(version: str = grpc.__version__) -> bool:
    """Whether a server of this grpcio ends when a call's method name is not UTF-8."""
    if FIXED_IN is None:
        return True
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) < FIXED_IN


def tolerate_bad_method_names() -> None:
    """Refuse calls whose method name is not UTF-8, as any unknown method; idempotent.

    grpcio's serving task decodes the name strictly and outside of any call, so one such call ends
    the whole server. The only hook is the error handler of strict decoding: within that task, and
    nowhere else, it replaces the name.
    """
    if needs_tolerant_decoding():
        codecs.register_error("strict", _decoding)


def _decoding(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeDecodeError) and _in_serving_task():
        return "\N{REPLACEMENT CHARACTER}", len(error.object)
    return _strict(error)


def _in_serving_task() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return False
    return task is not None and getattr(task.get_coro(), "__qualname__", None) == SERVING_TASK
